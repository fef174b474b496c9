// The token tree: each run of tokens once, what is shared drawn once, and where and why it branched.

import { useElementSize } from "@mantine/hooks";
import { amount, textOf, visible } from "../format.ts";
import { Empty } from "../parts/States.tsx";
import type { Divergence, TokenCall, Tokens } from "../types.ts";
import { layOut, type Placed } from "./paths.ts";

const LANE = 58;
const BAR = 26;

export function TreeView({ data, onCall }: { data: Tokens; onCall: (call: number) => void }) {
  const { ref, width } = useElementSize();
  if (data.segments.length === 0) return <div className="card"><Empty title="No tokens">No call of this attempt went through the gateway's own engine.</Empty></div>;
  const { placed, lanes, width: tokens } = layOut(data);
  const byResponse = new Map(data.calls.map((call, index) => [call.response_segment, { call, number: index + 1 }]));
  const callAt = new Map(data.calls.map((call, index) => [call.prompt_segment, { call, number: index + 1 }]));
  const scale = Math.max(width, 200) / tokens;
  const read = data.calls.reduce((sum, call) => sum + lengthOf(placed, call), 0);
  return (
    <div className="stack">
      <div className="row wrap small muted">
        <span><b style={{ color: "var(--text)" }}>{amount(data.tokens)}</b> tokens stored once</span>
        <span>instead of <b style={{ color: "var(--text)" }}>{amount(read)}</b> in {data.calls.length} separate prompts and responses{read > data.tokens ? ` (${Math.round(100 - (100 * data.tokens) / read)} % shared)` : ""}</span>
        <span className="row" style={{ gap: 6 }}><svg width="14" height="10" aria-hidden><rect width="14" height="10" rx="2" fill="var(--surface-2)" stroke="var(--line)" /></svg>prompt</span>
        <span className="row" style={{ gap: 6 }}><svg width="14" height="10" aria-hidden><rect width="14" height="10" rx="2" fill="color-mix(in srgb, var(--accent) 55%, var(--surface))" /></svg>sampled, trained</span>
        <span className="row" style={{ gap: 6 }}><svg width="14" height="10" aria-hidden><rect width="14" height="10" rx="2" fill="color-mix(in srgb, var(--gold) 45%, var(--surface))" /></svg>sampled, not trained</span>
      </div>
      <div className="card card-pad"><div ref={ref}>
        <svg className="tree" width="100%" height={lanes * LANE + 24} role="group" aria-label={`Token tree of ${data.calls.length} calls with ${data.tokens} tokens on ${lanes} branches`}>
          {placed.flatMap((parent) => parent.children.filter((child) => child.lane !== parent.lane).map((child) => <Branch key={child.segment.segment_id} parent={parent} child={child} scale={scale} />))}
          {placed.map((one) => <Bar key={one.segment.segment_id} one={one} scale={scale} sampled={one.segment.response === null ? undefined : byResponse.get(one.segment.response)} onCall={onCall} why={whyOf(one, callAt.get(one.segment.segment_id)?.call)} />)}
          <text className="label" x={0} y={lanes * LANE + 18}>token 0</text>
          <text className="label" x="100%" textAnchor="end" y={lanes * LANE + 18}>{amount(tokens)}</text>
        </svg>
      </div></div>
      <Branches data={data} />
    </div>
  );
}

function Bar({ one, scale, sampled, why, onCall }: { one: Placed; scale: number; sampled?: { call: TokenCall; number: number }; why: string | null; onCall: (call: number) => void }) {
  const x = one.start * scale;
  const width = Math.max(2, (one.end - one.start) * scale - 1.5);
  const y = one.lane * LANE + 14;
  const fill = sampled === undefined ? "var(--surface-2)" : sampled.call.trained ? "color-mix(in srgb, var(--accent) 55%, var(--surface))" : "color-mix(in srgb, var(--gold) 45%, var(--surface))";
  const text = `${sampled ? `call ${sampled.number}` : "prompt"} · ${amount(one.end - one.start)}`;
  const open = sampled && (() => onCall(sampled.number));
  return (
    <g className="seg" onClick={open} style={{ cursor: open ? "pointer" : undefined }} tabIndex={open ? 0 : undefined} role={open ? "button" : undefined}
      onKeyDown={(event) => { if (open && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); open(); } }} aria-label={open ? `Tokens of ${text}` : undefined}>
      <title>{`${text} tokens (${one.start} to ${one.end})${why ? `; ${why}` : ""}`}</title>
      <rect x={x} y={y} width={width} height={BAR} rx="4" fill={fill} stroke="var(--line)" />
      {width > text.length * 6 + 8 && <text x={x + 7} y={y + 17}>{text}</text>}
      {why && <text className="label" x={x} y={y - 4}>{why}</text>}
    </g>
  );
}

function Branch({ parent, child, scale }: { parent: Placed; child: Placed; scale: number }) {
  const x = child.start * scale;
  const from = parent.lane * LANE + 14 + BAR;
  const to = child.lane * LANE + 14 + BAR / 2;
  return <path d={`M${x} ${from} C ${x - 10} ${(from + to) / 2}, ${x - 10} ${to}, ${x} ${to}`} fill="none" stroke="var(--warn)" strokeWidth="1.6" />;
}

function whyOf(one: Placed, call: TokenCall | undefined): string | null {
  if (one.lane === 0 && one.start === 0) return null;
  const agent = call?.agent ? `${textOf(call.agent)}: ` : "";
  if (!call?.divergence) return agent && call?.continues === null ? `${agent}another conversation` : null;
  const lost = call.divergence.tokens_lost > 0 ? `, ${amount(call.divergence.tokens_lost)} tokens lost` : "";
  return `${agent}${call.divergence.cause.replaceAll("_", " ")}${lost}`;
}

function lengthOf(placed: Placed[], call: TokenCall): number {
  return placed.find((one) => one.segment.segment_id === call.response_segment)?.end ?? 0;
}

/** The text up to the break, how the known history went on, and how the prompt goes on instead. */
export function FirstDifference({ left }: { left: Divergence }) {
  if (!left.was && !left.now) return <span className="muted">–</span>;
  return (
    <div className="prewrap">
      <span className="muted">{visible(left.before ?? "")}</span>
      <del className="was">{visible(left.was ?? "")}</del> <ins className="now">{visible(left.now ?? "")}</ins>
    </div>
  );
}

function Branches({ data }: { data: Tokens }) {
  const diverged = data.calls.map((call, index) => ({ call, number: index + 1 })).filter(({ call }) => call.divergence);
  const anew = data.calls.map((call, index) => ({ call, number: index + 1 })).filter(({ call, number }) => number > 1 && call.continues === null && !call.divergence);
  if (diverged.length === 0 && anew.length === 0) return <p className="small muted" style={{ margin: 0 }}>Every call continued the one before it: nothing was lost.</p>;
  return (
    <div className="card scroll-x" tabIndex={0}>
      <table className="list">
        <thead><tr><th>Call</th><th>Branched because of</th><th>First difference</th><th className="num">At token</th><th className="num">Tokens lost</th></tr></thead>
        <tbody>
          {diverged.map(({ call, number }) => call.divergence && (
            <tr key={number}>
              <td>{number}</td>
              <td>{call.divergence.cause.replaceAll("_", " ")}{call.divergence.advice && <div className="small muted">{call.divergence.advice}</div>}</td>
              <td><FirstDifference left={call.divergence} /></td>
              <td className="num">{amount(call.divergence.position)}</td><td className="num">{amount(call.divergence.tokens_lost)}</td>
            </tr>
          ))}
          {anew.map(({ number }) => <tr key={number}><td>{number}</td><td className="muted" colSpan={2}>It continues no earlier call: another conversation.</td><td className="num">0</td><td className="num">–</td></tr>)}
        </tbody>
      </table>
    </div>
  );
}
