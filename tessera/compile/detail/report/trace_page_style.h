#pragma once

// Style sheet and script of the compile-trace page.
namespace tessera::compiler {

inline constexpr const char* kPageStyle = R"css(
:root { color-scheme: light dark; --line: #8884; --soft: #888; --own: #4a90d966; --arena: #2f6db5; --comm: #d9822b;
        --add: #2ea04333; --del: #f8514933; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; }
h2 { margin-top: 1.8em; } h3 { margin-bottom: .3em; } small, .legend, #here { color: var(--soft); font-weight: normal; }
.long { max-height: 26em; overflow-y: auto; } table { border-collapse: collapse; } th { text-align: left; font-weight: 600; }
td, th { padding: .15em .9em .15em 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: 240px; border-bottom: 1px solid var(--line); }
path.own { fill: var(--own); } path.arena { fill: var(--arena); }
path.limit, path.comm, path.cursor { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; }
path.limit { stroke: var(--soft); stroke-dasharray: 5 4; } path.comm { stroke: var(--comm); }
path.cursor { stroke: currentColor; }
.legend span { display: inline-block; width: .9em; height: .9em; margin-left: .8em; vertical-align: -.1em; }
span.own { background: var(--own); } span.arena { background: var(--arena); } span.comm { background: var(--comm); }
span.limit { background: repeating-linear-gradient(90deg, var(--soft) 0 4px, transparent 4px 7px); height: 2px;
             vertical-align: .25em; }
#here { min-height: 2.9em; overflow-wrap: anywhere; }
pre { font: 12px/1.4 ui-monospace, monospace; overflow-x: auto; margin: .4em 0; }
.program { border-left: 2px solid var(--line); }
.program > * { display: block; font-style: normal; font-weight: normal; text-decoration: none; white-space: pre; }
.program > *::before { content: attr(data-n); display: inline-block; width: 4ch; margin-right: 1ch; text-align: right;
                       color: var(--soft); }
.program > *::after { content: attr(data-b); margin-left: 2ch; color: var(--soft); }
.program > b { color: var(--soft); } .program > .k { overflow: hidden; text-overflow: ellipsis; }
.program > ins { background: var(--add); } .program > del { background: var(--del); }
summary { cursor: pointer; color: var(--soft); } .kernel summary { font-family: ui-monospace, monospace; }
)css";

// Shows bytes in use and the line of the node under the pointer. Starts at the node with the peak.
inline constexpr const char* kPageScript = R"js(
const curve = document.getElementById("curve"), cursor = document.getElementById("cursor");
const here = document.getElementById("here"), lines = document.getElementById(runs).children;
function show(node) {
  const x = (node + .5) / live.length * 1000;
  cursor.setAttribute("d", `M${x} 0V220`);
  here.textContent = `line ${firstNode + node + 1}: ${live[node].toLocaleString("en")} bytes in use. ` +
                     lines[firstNode + node].textContent;
}
if (live.length) {
  show(live.indexOf(live.reduce((a, b) => Math.max(a, b))));
  curve.addEventListener("mousemove", event => {
    const box = curve.getBoundingClientRect();
    show(Math.max(0, Math.min(live.length - 1, Math.floor((event.clientX - box.left) / box.width * live.length))));
  });
}
)js";

}  // namespace tessera::compiler
