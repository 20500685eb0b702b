"""What the scheduler did, in numbers.

Owns their names and the ratios between them. Knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStatistics:
    """Counts since the scheduler began, and what is there now.

    bytes_read: bytes of shards brought in; read_seconds: time that reading took;
    wait_seconds: the part of it that a sweep waited for.
    """

    sweeps: int = 0
    sweep_seconds: float = 0.0
    requests_running: int = 0
    requests_waiting: int = 0
    requests_in_sweeps: int = 0
    requests_stopped: int = 0
    requests_at_length: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0
    resident_bytes: int = 0
    resident_stages: int = 0
    kv_bytes_used: int = 0
    kv_bytes_total: int = 0

    @property
    def requests_per_sweep(self) -> float:
        """Give the mean number of requests that a sweep served."""
        return self.requests_in_sweeps / self.sweeps if self.sweeps else 0.0

    @property
    def bytes_read_per_token(self) -> float:
        """Give the bytes of shards brought in for one token of an answer."""
        return self.bytes_read / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def hidden_share(self) -> float:
        """Give the share of reading that went on behind computing; 1 when nothing was read."""
        if self.read_seconds <= 0:
            return 1.0
        return max(0.0, 1.0 - self.wait_seconds / self.read_seconds)
