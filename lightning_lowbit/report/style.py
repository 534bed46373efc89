"""Colors and style sheet of a page about a run, for light and dark schemes, phones and paper."""

# In the light and in the dark scheme. What matplotlib draws in a light color becomes the variable.
INK, GRID = "#5c6066", "#dcdfe3"
LINES = ("#1f63b0", "#c2540a", "#2b7d4f", "#8a4fb5", "#b1283f", "#0b7d8a", "#8b6a00", "#6b6f76")
SPANS = ("#f5f6f8", "#fbeee3", "#e8f4ec", "#f0ebf8")
_DARK = {
    **dict(zip((INK, GRID), ("#9aa1ab", "#2c3138"), strict=True)),
    **dict(
        zip(
            LINES,
            ("#6aabf2", "#f0944d", "#62c48d", "#c69bec", "#f0798c", "#4cc3d1", "#d8b548", "#a3a9b3"),
            strict=True,
        )
    ),
    **dict(zip(SPANS, ("#191c20", "#33251a", "#18291f", "#2a2033"), strict=True)),
}
VARIABLES = {light: f"--c{i}" for i, light in enumerate(_DARK)}

# Cells of heat maps from good to bad. Each is darker than the one before it (in the dark scheme: lighter), so that hue
# is not needed to tell them apart, on paper or by the color-blind; good ones are near the page's own color.
_HEAT = ("#fbf7ee", "#fee9b8", "#fed07a", "#fdac4a", "#ec7f1e", "#c04a02", "#7f2704")
_HEAT_DARK = ("#201d18", "#38290f", "#533a0b", "#754f0a", "#b0701a", "#e0943a", "#ffcb82")
HEAT_STEPS = len(_HEAT)
_HEAT_TEXT = [*["#000"] * 5, *["#fff"] * 2]
_HEAT_TEXT_DARK = [*["#fff"] * 4, *["#000"] * 3]


def _heat(colors: tuple[str, ...], texts: list[str]) -> str:
    pairs = enumerate(zip(colors, texts, strict=True))
    return "".join(f"--h{i}:{color};--t{i}:{text};" for i, (color, text) in pairs)


STYLE = (
    "\n:root{color-scheme:light dark;--page:#fff;--ink:#1b1d20;--soft:#5c6066;--rule:#e3e5e8;--box:#f6f7f8;"
    "--good:#2b7d4f;--fair:#9a6200;--bad:#b1283f;"
    + "".join(f"{variable}:{light};" for light, variable in VARIABLES.items())
    + _heat(_HEAT, _HEAT_TEXT)
    + "}\n@media screen and (prefers-color-scheme:dark){:root{--page:#131518;--ink:#e4e6e9;--soft:#9aa1ab;"
    "--rule:#2c3138;--box:#1b1e22;--good:#62c48d;--fair:#e0ac4a;--bad:#f0798c;"
    + "".join(f"{variable}:{_DARK[light]};" for light, variable in VARIABLES.items())
    + _heat(_HEAT_DARK, _HEAT_TEXT_DARK)
    + "}}\n"
    + "".join(f".h{i}{{background:var(--h{i});color:var(--t{i})}}" for i in range(HEAT_STEPS))
    + """
*{box-sizing:border-box}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:62rem;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.75rem;line-height:1.2;font-weight:650;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;font-weight:650;margin:2.75rem 0 .75rem;padding-top:.6rem;border-top:1px solid var(--rule)}
p{margin:.5rem 0;max-width:46rem;color:var(--soft);overflow-wrap:anywhere}
.alarming p{padding-left:.75rem;border-left:3px solid var(--fair);color:var(--ink);max-width:none}
.lead{margin:.4rem 0 1.5rem;color:var(--ink)}
.status{display:inline-block;white-space:nowrap;margin-left:.75rem;font-size:.8rem;font-weight:600;letter-spacing:0;vertical-align:.35em;color:var(--soft)}
.status.finished{color:var(--good)}.status.interrupted{color:var(--fair)}.status.failed{color:var(--bad)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr));gap:1.1rem 1.5rem;margin:0}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
dd small{display:block;font-size:.8rem;color:var(--soft)}
figure{margin:0;min-width:0}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(18rem,100%),1fr));gap:1.5rem 1.75rem}
.multiples figure{display:flex;flex-direction:column}.multiples svg{margin-top:auto}
figcaption{margin-bottom:.35rem;overflow-wrap:anywhere;font-size:.85rem}
.table figcaption{color:var(--soft)}
figcaption strong{font-weight:600;margin-right:.6rem}
figcaption small,.key,.note{color:var(--soft);font-size:.8rem}
.key{display:inline-block;margin-right:.9rem;font-variant-numeric:tabular-nums}
.key b{font-weight:500;color:var(--ink)}
.key i{display:inline-block;width:.9rem;height:.18rem;margin-right:.35rem;vertical-align:.22rem}
.key i.span{height:.8rem;vertical-align:-.1rem;border:1px solid var(--rule)}
.multiples .phase,.narrow{display:none}
.note{margin:.25rem 0 0}
svg{display:block;width:100%;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif!important}
.at>:not(rect){visibility:hidden}.at:hover>*{visibility:visible}.at>*{pointer-events:none}
.at rect{fill:none;pointer-events:all}.at path{stroke:var(--soft);stroke-width:.7}
.at text{fill:var(--ink);font-size:11px;font-variant-numeric:tabular-nums;
 paint-order:stroke;stroke:var(--page);stroke-width:4px}
.scroll{overflow-x:auto;margin:.5rem 0 1rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.28rem 1.25rem .28rem 0;border-bottom:1px solid var(--rule)}
th{font-weight:500;color:var(--soft)}
th,table:not(.pairs) td{white-space:nowrap}.pairs td{overflow-wrap:anywhere}
.number{text-align:right}
.heat .scroll{max-height:36rem;overflow:auto}
.heat table{border-collapse:separate;border-spacing:0;font-size:.75rem;line-height:1.25}
.heat th,.heat td{padding:.16rem .6rem;border:solid var(--page);border-width:0 1px 1px 0}
.heat td,.heat thead th{text-align:right;min-width:4rem}
.heat tr>:first-child{position:sticky;left:0;text-align:left;padding-left:0;background:var(--page)}
.heat thead th{position:sticky;top:0;z-index:1;background:var(--page)}.heat thead th:first-child{z-index:2}
.heat td{print-color-adjust:exact;-webkit-print-color-adjust:exact}.heat .words{color:var(--soft);font-style:italic}
.heat .key i{width:1.1rem;height:.7rem;margin:0;vertical-align:-.05rem;print-color-adjust:exact}
.heat .key i:first-of-type{margin-left:.4rem}.heat .key i:last-of-type{margin-right:.4rem}
pre{margin:.5rem 0;padding:.8rem 1rem;max-height:30rem;overflow:auto;background:var(--box);border-radius:4px;
 font:.8rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
@media (max-width:38rem){body{padding-top:1.5rem}.wide{display:none}.narrow{display:block}
 dl{grid-template-columns:repeat(2,minmax(0,1fr))}dd{font-size:1.15rem}
 .heat tr>:first-child{max-width:42vw;white-space:normal;overflow-wrap:break-word}
 table:not(.pairs) td:first-child{max-width:55vw;white-space:normal;overflow-wrap:break-word}
 .heat th,.heat td{padding:.16rem .3rem}.heat td,.heat thead th{min-width:3rem}}
@media print{.at{display:none}body{max-width:none;padding:0;font-size:12px}pre{max-height:none;white-space:pre-wrap}
 figure,tr{break-inside:avoid}h2{break-after:avoid}.scroll,.heat .scroll{overflow:visible;max-height:none}
 .table{break-inside:auto}.heat tr>*{position:static!important}}
"""
)
