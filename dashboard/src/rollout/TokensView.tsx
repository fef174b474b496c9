// Every token as the model saw or sampled it, coloured by what was recorded of it.

import { Button, SegmentedControl, Select } from "@mantine/core";
import { memo, useEffect, useMemo, useState } from "react";
import { useSearchParams } from "wouter";
import { useData } from "../api.ts";
import { amount, signed, visible } from "../format.ts";
import { Empty } from "../parts/States.tsx";
import type { Scores, Tokens } from "../types.ts";
import { type Token, tokensOf } from "./paths.ts";

const MOST = 3000;
const KEPT = 24;
/** Prompt tokens before the first sampled one that are shown at once. */
type Colour = "logprob" | "advantage" | "ratio" | "entropy" | "mask" | "version" | "filter";
const COLOURS: { value: Colour; label: string }[] = [
  { value: "logprob", label: "Log-prob" },
  { value: "advantage", label: "Advantage" },
  { value: "ratio", label: "Ratio" },
  { value: "entropy", label: "Entropy" },
  { value: "mask", label: "Mask" },
  { value: "version", label: "Version" },
  { value: "filter", label: "Sampling filter" },
];
const ABOUT: Record<Colour, string> = {
  logprob: "The stronger the colour, the less likely the token was under the distribution it was drawn from.",
  advantage: "Blue tokens were made likelier, orange ones less likely; computed again from the recorded rewards.",
  ratio: "Blue tokens are likelier under the weights after training than under those that sampled them, orange ones less likely.",
  entropy: "The stronger the colour, the less certain the weights are what comes here.",
  mask: "Coloured tokens were sampled by a policy in training; the others are its prompts.",
  version: "Tokens of one colour were sampled by one version of the weights.",
  filter: "How much likelier top-p, top-k or a grammar made the token than the plain softmax would.",
};

/** Colours that the weights must be asked for. */
const ASKED = new Set<Colour>(["ratio", "entropy"]);
const DOUBLE = Math.log(2);
/** Per cent of a colour behind a token at the most: with more of it the text would be hard to read on dark pages. */
const STRONGEST = 54;

export function TokensView({ data, call, onCall, scoresAt }: { data: Tokens; call: number; onCall: (call: number) => void; scoresAt: string }) {
  const [params, setParams] = useSearchParams();
  const colour = COLOURS.find((one) => one.value === params.get("colour"))?.value ?? "logprob";
  const setColour = (chosen: Colour) => setParams((now) => { const next = new URLSearchParams(now); next.set("colour", chosen); return next; }, { replace: true });
  const [asked, setAsked] = useState(false);
  const scores = useData<Scores>(asked ? scoresAt : null);
  const [selected, setSelected] = useState<number | null>(null);
  const [whole, setWhole] = useState(false);
  const chosen = data.calls[Math.min(call, data.calls.length) - 1];
  const tokens = useMemo(() => (chosen ? tokensOf(data, chosen, scores.data) : []), [data, chosen, scores.data]);
  const reach = useMemo(() => Math.max(1e-6, ...tokens.map((token) => Math.abs((colour === "entropy" ? token.entropy : token.advantage) ?? 0))), [tokens, colour]);
  useEffect(() => setSelected(null), [chosen]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.target instanceof HTMLElement && /INPUT|TEXTAREA/.test(event.target.tagName)) return;
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        if (event.target instanceof HTMLElement && event.target.getAttribute("role") === "radio") return;
        setSelected((now) => (now === null ? tokens.findIndex((token) => token.sampled) : Math.max(0, Math.min(tokens.length - 1, now + (event.key === "ArrowRight" ? 1 : -1)))));
      }
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [tokens]);
  if (!chosen) return <div className="card"><Empty title="No tokens">No call of this attempt went through the gateway's own engine.</Empty></div>;
  const first = tokens.findIndex((token) => token.sampled);
  const hidden = whole ? 0 : Math.max(first - KEPT, tokens.length - MOST, 0);
  const shown = hidden > KEPT ? tokens.slice(hidden) : tokens;
  const noAdvantages = colour === "advantage" && data.advantages;
  return (
    <div className="stack">
      <div className="row wrap">
        <Select size="xs" w={210} aria-label="Call" allowDeselect={false} value={String(call)} onChange={(value) => onCall(Number(value))}
          data={data.calls.map((one, index) => ({ value: String(index + 1), label: `Up to call ${index + 1}${one.agent ? ` (${one.agent})` : ""}` }))} />
        <SegmentedControl size="xs" aria-label="Colour by" data={COLOURS} value={colour} onChange={(value) => setColour(value as Colour)} />
        <span className="small muted">{amount(tokens.length)} tokens, {amount(tokens.filter((token) => token.sampled).length)} sampled</span>
      </div>
      {data.texts && <p className="small muted" style={{ margin: 0 }}>{data.texts}</p>}
      <div className="tokens-grid">
        <div className="card">
          {shown.length < tokens.length && <div className="filters small muted" style={{ alignItems: "center" }}>{amount(tokens.length - shown.length)} tokens before these <Button size="compact-xs" variant="default" onClick={() => setWhole(true)}>Show them</Button></div>}
          <div className="tokens" onClick={(event) => { const at = (event.target as HTMLElement).closest<HTMLElement>("[data-i]"); if (at) setSelected(Number(at.dataset.i)); }}>
            <Text tokens={shown} colour={colour} reach={reach} />
            {selected !== null && <Selection index={selected} />}
          </div>
        </div>
        <aside className="inspect stack">
          <div className="card card-pad">
            <Scale colour={colour} reach={reach} tokens={tokens} />
            {ASKED.has(colour) && <Asking scores={scores} asked={asked} ask={() => setAsked(true)} />}
            <p className="small muted" style={{ margin: "8px 0 0" }}>{noAdvantages ? `Not known: ${data.advantages}` : ABOUT[colour]}</p>
          </div>
          <div className="card card-pad" role="status">{selected === null ? <p className="small muted" style={{ margin: 0 }}>Click a token, or press <kbd>→</kbd>, to see what was recorded of it.</p> : <Facts token={tokens[selected]} />}</div>
        </aside>
      </div>
    </div>
  );
}

/** Ratio and entropy of single tokens are not recorded: the run's checkpoint is loaded to compute them, on demand. */
function Asking({ scores, asked, ask }: { scores: { data?: Scores; error: Error | null }; asked: boolean; ask: () => void }) {
  const line = { margin: "8px 0 0" };
  if (!asked) return <Button size="xs" variant="light" mt="sm" fullWidth onClick={ask}>Compute with the run's weights</Button>;
  if (scores.error) return <p className="small num-bad" role="alert" style={line}>{scores.error.message}</p>;
  if (!scores.data) return <p className="small" role="status" style={line}>Loading the weights, which takes a few seconds…</p>;
  if (scores.data.reason) return <p className="small" role="status" style={line}>Not known: {scores.data.reason}</p>;
  return <p className="small" role="status" style={line}>By the weights after step {scores.data.step}.</p>;
}

const Text = memo(function Text({ tokens, colour, reach }: { tokens: Token[]; colour: Colour; reach: number }) {
  return (
    <>
      {tokens.map((token) => (
        <span key={token.index} data-i={token.index} className={token.sampled ? "t" : "t prompt"} style={paint(token, colour, reach)}>
          <Shown text={token.text} />
        </span>
      ))}
    </>
  );
});

/** A line's end keeps its break and is seen as well; control characters are seen and do nothing. */
function Shown({ text }: { text: string }) {
  if (!text.includes("\n")) return <>{visible(text)}</>;
  return <>{text.split("\n").map((line, index) => <span key={index}>{index > 0 && <><span className="nl">↵</span>{"\n"}</>}{visible(line)}</span>)}</>;
}

/** Marks the selected token in the text without drawing all of it again. */
function Selection({ index }: { index: number }) {
  useEffect(() => {
    const found = document.querySelector(`.tokens [data-i="${index}"]`);
    found?.classList.add("sel");
    found?.scrollIntoView({ block: "nearest" });
    return () => found?.classList.remove("sel");
  }, [index]);
  return null;
}

function paint(token: Token, colour: Colour, reach: number): { backgroundColor: string } | undefined {
  const tint = (name: string, share: number) => ({ backgroundColor: `color-mix(in srgb, var(${name}) ${Math.round(Math.min(1, share) * STRONGEST)}%, transparent)` });
  if (!token.sampled) return undefined;
  if (colour === "logprob" && token.logprob !== null) return tint("--hot", 1 - Math.exp(token.logprob));
  if (colour === "advantage" && token.advantage !== null) return token.advantage === 0 ? undefined : tint(token.advantage > 0 ? "--cold" : "--hot", Math.abs(token.advantage) / reach);
  if (colour === "ratio" && token.ratio !== null) return tint(token.ratio > 1 ? "--cold" : "--hot", Math.abs(Math.log(token.ratio)) / DOUBLE);
  if (colour === "entropy" && token.entropy !== null) return tint("--hot", token.entropy / reach);
  if (colour === "mask") return token.trained ? tint("--accent", 0.55) : undefined;
  if (colour === "version" && token.version !== null) return { backgroundColor: `color-mix(in srgb, hsl(${(token.version * 67) % 360} 70% 55%) 34%, transparent)` };
  if (colour === "filter" && token.logprob !== null && token.plain !== null) return tint("--hot", Math.abs(token.logprob - token.plain));
  return undefined;
}

function Scale({ colour, reach, tokens }: { colour: Colour; reach: number; tokens: Token[] }) {
  const bar = (background: string, left: string, right: string) => (<><div className="scale" style={{ background }} /><div className="row small muted" style={{ justifyContent: "space-between", marginTop: 4 }}><span>{left}</span><span>{right}</span></div></>);
  const strong = (name: string) => `color-mix(in srgb, var(${name}) ${STRONGEST}%, transparent)`;
  const hot = strong("--hot");
  if (colour === "logprob") return bar(`linear-gradient(90deg, transparent, ${hot})`, "likely (p = 1)", "unlikely (p → 0)");
  if (colour === "advantage") return bar(`linear-gradient(90deg, ${hot}, transparent, ${strong("--cold")})`, signed(-reach), signed(reach));
  if (colour === "ratio") return bar(`linear-gradient(90deg, ${hot}, transparent, ${strong("--cold")})`, "half or less", "double or more");
  if (colour === "entropy") return bar(`linear-gradient(90deg, transparent, ${hot})`, "0 nats", tokens.some((token) => token.entropy !== null) ? `${reach.toFixed(2)} nats` : "high");
  if (colour === "filter") return bar(`linear-gradient(90deg, transparent, ${hot})`, "not at all", "e times or more");
  if (colour === "version") return <span className="small">Versions {[...new Set(tokens.map((token) => token.version).filter((v) => v !== null))].map((v) => <span key={v} className="badge" style={{ backgroundColor: `color-mix(in srgb, hsl(${(v * 67) % 360} 70% 55%) 34%, transparent)`, color: "var(--text)", marginRight: 4 }}>v{v}</span>)}</span>;
  return <span className="small">Trained on: {amount(tokens.filter((token) => token.trained).length)} of {amount(tokens.length)} tokens</span>;
}

function Facts({ token }: { token: Token }) {
  const number = (value: number | null) => (value === null ? "–" : value.toFixed(4));
  const rows: [string, string][] = [
    ["Token", JSON.stringify(visible(token.text))],
    ["Id", String(token.id)],
    ["Position", String(token.index)],
    ["From", token.sampled ? `call ${token.call}, sampled` : "prompt"],
    ["Log-prob", number(token.logprob)],
    ["Probability", token.logprob === null ? "–" : `${(100 * Math.exp(token.logprob)).toFixed(2)} %`],
    ["Plain log-prob", number(token.plain)],
    ["Advantage", token.advantage === null ? "–" : signed(token.advantage)],
    ...(token.ratio === null ? [] : [["Ratio", token.ratio.toFixed(4)] as [string, string]]),
    ...(token.entropy === null ? [] : [["Entropy", `${token.entropy.toFixed(4)} nats`] as [string, string]]),
    ["Trained", token.trained ? "yes" : "no"],
    ["Weights", token.version === null ? "–" : `v${token.version}`],
  ];
  return <dl className="facts">{rows.map(([name, value]) => <div key={name} style={{ display: "contents" }}><dt>{name}</dt><dd className={name === "Token" ? "mono" : undefined}>{value}</dd></div>)}</dl>;
}
