"""Stores in object storage: where they are pushed to and pulled from.

Each module says what it owns. The object storage library is imported only when a URL is opened.
"""
