// What happened when: spans as bars, children under their parents.

import { useState } from "react";
import { metric, seconds, textOf } from "../format.ts";
import { Empty } from "../parts/States.tsx";
import type { Span } from "../types.ts";

interface Row {
  span: Span;
  depth: number;
}

export function Waterfall({ spans, leftOut }: { spans: Span[]; leftOut: number }) {
  const [open, setOpen] = useState<string | null>(null);
  if (spans.length === 0) return <div className="card"><Empty title="No spans">Nothing was traced in this attempt.</Empty></div>;
  const rows = inOrder(spans);
  const begins = Math.min(...spans.map((span) => span.start_time ?? Infinity));
  const ends = Math.max(...spans.map((span) => span.end_time ?? span.start_time ?? 0));
  const whole = Math.max(ends - begins, 1e-6);
  return (
    <div className="card fall" style={{ padding: "8px 0" }}>
      <div className="fall-row fall-head"><span>Span</span><span className="row" style={{ justifyContent: "space-between" }}><span>0</span><span>{seconds(whole)}</span></span><span style={{ textAlign: "right" }}>Took</span></div>
      {rows.map(({ span, depth }) => {
        const start = (span.start_time ?? begins) - begins;
        const took = (span.end_time ?? span.start_time ?? begins) - (span.start_time ?? begins);
        const isOpen = open === span.span_id;
        return (
          <div key={span.span_id}>
            <button type="button" className="fall-row" aria-expanded={isOpen} onClick={() => setOpen(isOpen ? null : span.span_id)}>
              <span className="clip" style={{ paddingLeft: depth * 16 }}>{textOf(span.name)} {Object.entries(span.rewards).map(([name, value]) => <span key={name} className="badge warn">{name} {metric(value)}</span>)}</span>
              <span className="fall-lane"><i className={kindOf(span)} style={{ left: `${(100 * start) / whole}%`, width: `${Math.min(100 - (100 * start) / whole, (100 * took) / whole)}%` }} /></span>
              <span className="muted small" style={{ textAlign: "right" }}>{took > 0 ? seconds(took) : "·"}</span>
            </button>
            {isOpen && <Details span={span} />}
          </div>
        );
      })}
      {leftOut > 0 && <p className="small muted card-pad">{leftOut.toLocaleString("en")} more spans are in the store.</p>}
    </div>
  );
}

function Details({ span }: { span: Span }) {
  return (
    <div className="card-pad" style={{ background: "var(--surface-2)" }}>
      {span.description && <pre className="error-box prewrap">{textOf(span.description)}</pre>}
      <dl className="facts" style={{ gridTemplateColumns: "minmax(140px, max-content) minmax(0, 1fr)" }}>
        {Object.entries(span.attributes).map(([name, value]) => (
          <div key={name} style={{ display: "contents" }}><dt className="mono">{textOf(name)}</dt><dd className="prewrap" style={{ textAlign: "left" }}>{textOf(value)}</dd></div>
        ))}
      </dl>
      {span.events.length > 0 && <pre className="prewrap">{textOf(span.events)}</pre>}
    </div>
  );
}

function kindOf(span: Span): string {
  if (span.status === "ERROR") return "error";
  if (Object.keys(span.rewards).length > 0) return "reward";
  return span.call_id ? "model" : "";
}

/** Children after their parent, each level by time; a parent that is not here is none. */
function inOrder(spans: Span[]): Row[] {
  const known = new Set(spans.map((span) => span.span_id));
  const children = new Map<string, Span[]>();
  for (const span of spans) {
    const parent = span.parent_id !== null && known.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : "";
    children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const rows: Row[] = [];
  const seen = new Set<string>();
  const visit = (parent: string, depth: number) => {
    for (const span of (children.get(parent) ?? []).sort((a, b) => (a.start_time ?? 0) - (b.start_time ?? 0))) {
      if (seen.has(span.span_id)) continue;
      seen.add(span.span_id);
      rows.push({ span, depth });
      if (depth < 60) visit(span.span_id, depth + 1);
    }
  };
  visit("", 0);
  for (const span of spans) if (!seen.has(span.span_id)) rows.push({ span, depth: 0 });
  return rows;
}
