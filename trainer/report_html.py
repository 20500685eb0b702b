"""The page that `train-report` writes: one file that needs nothing else.

Owns the frame, the style and how data gets into the page. The drawing is `report_html_script`.
Knows nothing of stores. Invariant: the page asks no host for anything; its own policy forbids it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trainer.report_html_script import SCRIPT

STYLE = """
:root{--ink:#1c2330;--soft:#667085;--line:#e3e7ee;--page:#f6f7f9;--card:#fff;--hot:#c2410c}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#2b3342;
--page:#12161d;--card:#1a202b;--hot:#fb923c}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:14px/1.45 system-ui,sans-serif}main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:22px;margin:0}h2{font-size:14px;margin:0 0 6px}
.sub{color:var(--soft);margin:2px 0 16px}
.facts{display:flex;flex-wrap:wrap;gap:10px;margin-bottom:14px}.fact{background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:8px 14px}
.fact b{display:block;font-size:18px}.fact span{color:var(--soft);font-size:12px}
.grid{display:grid;grid-template-columns:1fr 1fr;gap:14px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;
min-width:0;position:relative}.wide{grid-column:1/-1}svg{display:block;width:100%;height:auto}
text{fill:var(--soft);font-size:11px}.legend{font-size:12px;color:var(--soft);display:flex;
flex-wrap:wrap;gap:4px 14px;margin-top:4px}.legend i{display:inline-block;width:10px;height:10px;
border-radius:2px;margin-right:5px}.tip{position:absolute;pointer-events:none;background:var(--ink);
color:var(--card);padding:4px 8px;border-radius:5px;font-size:12px;white-space:pre;display:none;
z-index:2}table{border-collapse:collapse;width:100%;font-size:13px}td,th{text-align:left;
padding:4px 8px;border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--soft)}
select{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:3px 6px}.none{color:var(--soft)}td{overflow-wrap:anywhere}
@media(max-width:760px){.grid{grid-template-columns:1fr}}
"""
FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><main>
<h1>{title}</h1><p class="sub">{subtitle}
 · <label>over <select id="axis"><option value="step">steps</option>
<option value="tokens_seen">tokens</option><option value="time">time</option></select></label></p>
<div class="facts">{facts}</div><div class="grid" id="charts"></div>
<noscript>The curves are drawn by a script inside this page.</noscript></main>
<script id="data" type="application/json">{data}</script><script>{script}</script></body></html>
"""


def page(data: Mapping[str, Any]) -> str:
    """Give the whole page as text."""
    first, last = data["step"][0], data["step"][-1]
    thinned = (
        "" if data["shown_every"] == 1 else f" · about every {data['shown_every']}th step is drawn"
    )
    began, ended = (_moment(data["time"][index]) for index in (0, -1))
    subtitle = (
        f"branch {data['branch']} · steps {first:,} to {last:,} · {began} to {ended}{thinned}"
    )
    return FRAME.format(
        title=html.escape(f"Training of {data['store']}"),
        style=STYLE,
        subtitle=html.escape(subtitle),
        facts="".join(
            f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in _facts(data)
        ),
        # JSON inside a script element ends at the first "</"; a backslash there changes no text.
        data=json.dumps(_finite(data), separators=(",", ":")).replace("</", "<\\/"),
        script=SCRIPT,
    )


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    series = data["series"]
    losses = _numbers(series["loss"])
    held_out = _numbers(series["validation_loss"])
    rates = _numbers(series["tokens_per_second"])
    tokens = _numbers(data["tokens_seen"])
    snapshots = sum(event["kind"] == "snapshot" for event in data["events"])
    facts = [("steps committed", f"{data['step_count']:,}")]
    facts += [("tokens", f"{int(tokens[-1]):,}")] if tokens else []
    facts += [("last loss", f"{losses[-1]:.4f}")] if losses else []
    facts += [("best validation loss", f"{min(held_out):.4f}")] if held_out else []
    facts += (
        [("tokens a second, median", f"{sorted(rates)[len(rates) // 2]:,.0f}")] if rates else []
    )
    facts += [("snapshots pinned", f"{snapshots:,}"), ("steps skipped", f"{len(data['skips']):,}")]
    if data["left_behind"]:
        facts.append(("steps left behind by rewinds", f"{data['left_behind']:,}"))
    return facts


def _numbers(values: list[Any]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _finite(value: Any) -> Any:
    """Put null where a number is not finite: JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
