"""Low-rank adapters beside a frozen base that is streamed.

The base is a set of immutable objects; a step stages `adapters/<stage>` and `optim/<stage>` alone.
"""
