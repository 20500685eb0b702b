"""Simulated disks for the store: recorded operations, faults, crash images and their explorer.

Ships with the store so that programs built on it can try their own workloads. Nothing in the
store imports it.
"""
