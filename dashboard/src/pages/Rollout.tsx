// One rollout: what it was to do, what was said, token by token, and what came of it.

import { Select } from "@mantine/core";
import { Link, useSearchParams } from "wouter";
import { useData, withParams } from "../api.ts";
import { metric, moment, seconds, textOf } from "../format.ts";
import { RewardNumber, Status, useRange } from "../parts/Badges.tsx";
import { Id } from "../parts/Copy.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import { FindingsOf } from "../parts/Verdicts.tsx";
import { Conversation } from "../rollout/Conversation.tsx";
import { TokensView } from "../rollout/TokensView.tsx";
import { TreeView } from "../rollout/TreeView.tsx";
import { Waterfall } from "../rollout/Waterfall.tsx";
import { oneLine } from "../tasks.ts";
import type { Rollout, Tokens } from "../types.ts";

const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["tree", "Token tree"], ["spans", "Spans"], ["details", "Details"]] as const;

export default function RolloutPage({ id }: { id: string }) {
  const [params, setParams] = useSearchParams();
  const attempt = params.get("attempt");
  const tab = params.get("tab") ?? "conversation";
  const path = `/rollouts/${encodeURIComponent(id)}`;
  const query = useData<Rollout>(withParams(path, { attempt }), { keep: true });
  const tokens = useData<Tokens>(tab === "tokens" || tab === "tree" ? withParams(`${path}/tokens`, { attempt }) : null);
  const set = (changes: Record<string, string | null>) =>
    setParams((now) => {
      const next = new URLSearchParams(now);
      for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
      return next;
    }, { replace: true });
  const toCall = (call: number) => set({ tab: "tokens", call: String(call) });
  return (
    <Loaded query={query}>
      {(rollout) => (
        <>
          <Head rollout={rollout} set={set} />
          {latestError(rollout) && <pre className="error-box prewrap" role="alert" style={{ marginBottom: 16 }}>{latestError(rollout)}</pre>}
          {rollout.run_id && <FindingsOf run={rollout.run_id} rollout={rollout.rollout_id} />}
          <nav className="tabs" aria-label="Views of the rollout">
            {TABS.map(([name, title]) => <Link key={name} href={withParams(path, { attempt, tab: name === "conversation" ? null : name })} aria-current={tab === name ? "page" : undefined}>{title}</Link>)}
          </nav>
          {tab === "conversation" && <Talk rollout={rollout} />}
          {tab === "tokens" && <Loaded query={tokens}>{(data) => <TokensView data={data} call={Number(params.get("call") ?? data.calls.length)} onCall={toCall} scoresAt={withParams(`${path}/scores`, { attempt })} />}</Loaded>}
          {tab === "tree" && <Loaded query={tokens}>{(data) => <TreeView data={data} onCall={toCall} />}</Loaded>}
          {tab === "spans" && <Waterfall spans={rollout.spans} leftOut={rollout.spans_left_out} />}
          {tab === "details" && <Details rollout={rollout} />}
        </>
      )}
    </Loaded>
  );
}

function latestError(rollout: Rollout): string | null {
  const error = rollout.attempts_made.find((attempt) => attempt.attempt_id === rollout.attempt_id)?.error;
  return error ? textOf(error) : null;
}

function Head({ rollout, set }: { rollout: Rollout; set: (changes: Record<string, string | null>) => void }) {
  const range = useRange(rollout.run_id);
  const run = rollout.run_id && `/runs/${encodeURIComponent(rollout.run_id)}`;
  return (
    <div className="head">
      <div className="grow">
        <div className="crumbs">
          {run ? (<><Link href="/">Runs</Link> / <Link href={run}>{rollout.run_name}</Link> / <Link href={`${run}/rollouts`}>Rollouts</Link></>) : <Link href="/rollouts">Rollouts</Link>} / <Id value={rollout.rollout_id} />
        </div>
        <h1 className="isolate clamp3">{oneLine(rollout.task)}</h1>
        <div className="head-facts">
          <span>Reward <RewardNumber value={rollout.reward} range={range} /></span>
          <Status value={rollout.outcome ?? rollout.status} />
          {rollout.step !== null && run && <Link className="link" href={withParams(`${run}/rollouts`, { step: rollout.step })}>step {rollout.step}</Link>}
          {rollout.mode && <span>{rollout.mode}</span>}
          {rollout.group && <Link className="link" href={`/rollouts/${encodeURIComponent(rollout.rollout_id)}/group`}>Compare with its siblings (group {rollout.group})</Link>}
          <span>{moment(rollout.start_time)}</span>
          {rollout.end_time && <span>{seconds(rollout.end_time - rollout.start_time)}</span>}
        </div>
      </div>
      {rollout.attempts_made.length > 1 && (
        <Select size="xs" w={190} label="Attempt" allowDeselect={false} value={rollout.attempt_id} onChange={(value) => set({ attempt: value })}
          data={rollout.attempts_made.map((attempt) => ({ value: attempt.attempt_id, label: `${attempt.sequence_id}: ${attempt.outcome ?? attempt.status}` }))} />
      )}
    </div>
  );
}

function Talk({ rollout }: { rollout: Rollout }) {
  if (rollout.calls.length === 0)
    return <div className="card"><Empty title="No model call">{rollout.attempt_id === null ? "It waits for a runner." : "The agent has not called a model through the gateway in this attempt."}</Empty></div>;
  return <Conversation calls={rollout.calls} forks={rollout.forks} forkCommand={rollout.fork_command} />;
}

function Details({ rollout }: { rollout: Rollout }) {
  const rewards = rollout.spans.flatMap((span) => Object.entries(span.rewards).map(([name, value]) => ({ name, value, agent: span.attributes["agentlightning.reward.agent"] })));
  return (
    <div className="pair">
      <section className="card card-pad" aria-label="Task"><div className="card-title"><h2>Task</h2></div><pre className="prewrap">{textOf(rollout.task)}</pre></section>
      <section className="card card-pad" aria-label="Rewards">
        <div className="card-title"><h2>Rewards</h2></div>
        {rewards.length === 0 ? <p className="small muted">None was given.</p> : <dl className="facts">{rewards.map((one, index) => <div key={index} style={{ display: "contents" }}><dt>{textOf(one.name)}{one.agent ? ` (${textOf(one.agent)})` : ""}</dt><dd>{metric(one.value)}</dd></div>)}</dl>}
      </section>
      <section className="card card-pad" aria-label="Attempts">
        <div className="card-title"><h2>Attempts</h2></div>
        {rollout.attempts_made.map((attempt) => (
          <div key={attempt.attempt_id} className="verdict">
            <span>{attempt.sequence_id}</span><Status value={attempt.outcome ?? attempt.status} />
            <div className="grow small"><Id value={attempt.attempt_id} whole /><div className="muted">{attempt.worker_id ?? "no worker"} · {attempt.end_time ? seconds(attempt.end_time - attempt.start_time) : "under way"}</div></div>
          </div>
        ))}
      </section>
      <section className="card card-pad" aria-label="Metadata">
        <div className="card-title"><h2>Metadata</h2></div>
        <pre className="prewrap">{textOf(rollout.metadata)}</pre>
        {rollout.resources_id && <p className="small">Resources <Link className="link mono" href={`/resources#${rollout.resources_id}`}>{rollout.resources_id}</Link></p>}
      </section>
    </div>
  );
}
