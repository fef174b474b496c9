// Siblings: the rollouts of one task in one step, the best beside the worst, and the token where they part.

import { NumberInput, Select } from "@mantine/core";
import { Link, useLocation, useSearchParams } from "wouter";
import { useData, withParams } from "../api.ts";
import { amount, reward, seconds, short, visible } from "../format.ts";
import { asFile, type Labels, useLabels } from "../labels.ts";
import { RewardNumber, Signed, Status, useRange } from "../parts/Badges.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import { Conversation } from "../rollout/Conversation.tsx";
import { oneLine } from "../tasks.ts";
import type { Group, Parting, Rollout, Sibling } from "../types.ts";

export default function GroupPage({ id }: { id: string }) {
  const query = useData<Group>(`/rollouts/${encodeURIComponent(id)}/group`);
  return <Loaded query={query}>{(group) => <View group={group} id={id} />}</Loaded>;
}

function View({ group, id }: { group: Group; id: string }) {
  const [params, setParams] = useSearchParams();
  const ranked = [...group.siblings].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const left = params.get("left") ?? group.best ?? id;
  const right = params.get("right") ?? (group.worst !== group.best ? group.worst : null) ?? ranked.find((one) => one.rollout_id !== left)?.rollout_id ?? null;
  const choose = (side: string, value: string | null) => setParams((now) => { const next = new URLSearchParams(now); if (value) next.set(side, value); return next; }, { replace: true });
  const [labels, label] = useLabels(group.run_id ?? "");
  const rewards = new Set(group.siblings.map((one) => one.reward));
  const run = group.run_id && `/runs/${encodeURIComponent(group.run_id)}`;
  return (
    <div className="stack">
      <div>
        <div className="crumbs">{run && <><Link href="/">Runs</Link> / <Link href={run}>{group.run_name}</Link> / <Link href={withParams(`${run}/rollouts`, { step: group.step })}>step {group.step}</Link> /</>} group {group.group ?? "–"}</div>
        <h1 className="isolate clamp3">{oneLine(group.task)}</h1>
        <div className="head-facts">
          <span><b>{group.siblings.length}</b> siblings</span>
          {rewards.size === 1 && group.siblings.length > 1 && <span className="badge warn">all earned the same: nothing to learn here</span>}
          {group.advantages && <span>Advantages are not known: {group.advantages}</span>}
        </div>
      </div>
      <Siblings siblings={ranked} run={group.run_id} left={left} right={right} choose={choose} labels={labels} label={label} />
      <LabelsOf labels={labels} run={group.run_name} />
      {right === null ? <div className="card"><Empty title="It has no siblings" /></div> : (
        <>
          {left === group.best && right in group.partings && <PartingView parting={group.partings[right]} />}
          <div className="pair">
            <Side id={left} label="Left" siblings={ranked} choose={(value) => choose("left", value)} />
            <Side id={right} label="Right" siblings={ranked} choose={(value) => choose("right", value)} />
          </div>
        </>
      )}
    </div>
  );
}

/** What was labelled in this run so far, and what it is good for. */
function LabelsOf({ labels, run }: { labels: Labels; run: string | null }) {
  const many = Object.keys(labels).length;
  if (many === 0) return null;
  return (
    <p className="small muted">
      {many === 1 ? "One rollout of this run has a label" : `${many} rollouts of this run have a label`}, kept in this browser. <a className="link" href={asFile(labels)} download="labels.jsonl">Download labels.jsonl</a>, then <code>agl judge {run ?? "RUN"} --labels labels.jsonl</code> says how far a judge agrees.
    </p>
  );
}

interface SiblingsProps {
  siblings: Sibling[];
  run: string | null;
  left: string;
  right: string | null;
  choose: (side: string, value: string) => void;
  labels: Labels;
  label: (rollout: string, label: number | null) => void;
}

function Siblings({ siblings, run, left, right, choose, labels, label }: SiblingsProps) {
  const [, go] = useLocation();
  const range = useRange(run);
  return (
    <div className="card scroll-x" tabIndex={0}>
      <table className="list">
        <thead><tr><th>Sibling</th><th className="num">Reward</th><th className="num">Advantage</th><th>Outcome</th><th className="num">Calls</th><th className="num">Sampled tokens</th><th className="num">Took</th><th>Label</th><th>Show</th></tr></thead>
        <tbody>
          {siblings.map((one) => (
            <tr key={one.rollout_id} className={one.rollout_id === left || one.rollout_id === right ? "at" : undefined}>
              <td><Link className="link mono" href={`/rollouts/${encodeURIComponent(one.rollout_id)}`}>{short(one.rollout_id)}</Link></td>
              <td className="num"><RewardNumber value={one.reward} range={range} /></td>
              <td className="num"><Signed value={one.advantage} /></td>
              <td><Status value={one.outcome ?? one.status} /></td>
              <td className="num">{amount(one.calls)}</td>
              <td className="num">{amount(one.tokens)}</td>
              <td className="num small">{seconds(one.seconds)}</td>
              <td>
                <NumberInput size="xs" w={76} hideControls aria-label={`Label of ${short(one.rollout_id)}`} placeholder="–" value={labels[one.rollout_id] ?? ""}
                  onChange={(value) => label(one.rollout_id, typeof value === "number" && Number.isFinite(value) ? value : null)} />
              </td>
              <td className="small">
                <button type="button" className="act link" onClick={() => choose("left", one.rollout_id)}>left</button>{" · "}
                <button type="button" className="act link" onClick={() => choose("right", one.rollout_id)}>right</button>{" · "}
                <button type="button" className="act link" onClick={() => go(`/rollouts/${encodeURIComponent(one.rollout_id)}?tab=tokens`)}>tokens</button>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function PartingView({ parting }: { parting: Parting | null }) {
  if (parting === null) return <div className="card card-pad small muted">These two sampled the same tokens to the end.</div>;
  if (parting.in_prompt) return <div className="card card-pad small muted">They part before the prompt of call {parting.call + 1}: what they were told there differs.</div>;
  const line = (texts: string[], tone: string) => texts.map((text, index) => <span key={index} style={index === 0 ? { background: `var(--${tone}-soft)`, color: `var(--${tone})`, borderRadius: 3, outline: `1px solid var(--${tone})`, padding: "1px 2px" } : undefined}>{visible(text)}</span>);
  return (
    <section className="card card-pad" aria-label="Where they part">
      <div className="card-title"><h2>Where they part</h2><span className="small muted">call {parting.call + 1}, sampled token {parting.position + 1}</span></div>
      <div className="prewrap">
        <div className="muted">{parting.position > parting.before.length ? "…" : ""}{parting.before.map((text) => visible(text)).join("")}</div>
        <div style={{ marginTop: 6 }}><span className="badge good">best</span> {parting.one.length ? line(parting.one, "good") : <i className="muted">ends here</i>}</div>
        <div style={{ marginTop: 6 }}><span className="badge bad">other</span> {parting.other.length ? line(parting.other, "bad") : <i className="muted">ends here</i>}</div>
      </div>
    </section>
  );
}

function Side({ id, label, siblings, choose }: { id: string; label: string; siblings: Sibling[]; choose: (value: string | null) => void }) {
  const query = useData<Rollout>(`/rollouts/${encodeURIComponent(id)}`);
  return (
    <section aria-label={label}>
      <Select size="xs" aria-label={`${label} sibling`} mb="sm" allowDeselect={false} value={id} onChange={choose}
        data={siblings.map((one) => ({ value: one.rollout_id, label: `${short(one.rollout_id)}: reward ${reward(one.reward)}` }))} />
      <Loaded query={query}>{(rollout) => rollout.calls.length ? <Conversation calls={rollout.calls} compact /> : <Empty title="No model call" />}</Loaded>
    </section>
  );
}
