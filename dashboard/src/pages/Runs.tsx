// All runs of the store, the latest first; two or more of them can be compared.

import { Button, Checkbox } from "@mantine/core";
import { useState } from "react";
import { Link, useLocation } from "wouter";
import { useData } from "../api.ts";
import { ago, amount, moment, seconds, textOf } from "../format.ts";
import { RewardNumber, StandingBadge } from "../parts/Badges.tsx";
import { Spark } from "../parts/Chart.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import type { ListedRun } from "../types.ts";

export function Runs() {
  const query = useData<{ runs: ListedRun[]; total: number }>("/runs");
  const [chosen, setChosen] = useState<string[]>([]);
  const [, go] = useLocation();
  const toggle = (id: string) => setChosen((now) => (now.includes(id) ? now.filter((one) => one !== id) : [...now, id]));
  return (
    <>
      <div className="head">
        <div>
          <h1>Runs</h1>
          <div className="head-facts">{query.data ? `${amount(query.data.total)} ${query.data.total === 1 ? "run" : "runs"}${query.data.runs.some((run) => run.elsewhere) ? "; those marked ↗ have a store of their own" : ""}` : " "}</div>
        </div>
        {(query.data?.runs.length ?? 0) > 1 && <Button disabled={chosen.length < 2} onClick={() => go(`/compare?runs=${chosen.map(encodeURIComponent).join(",")}`)}>
          {chosen.length < 2 ? "Choose two runs to compare" : `Compare ${chosen.length} runs`}
        </Button>}
      </div>
      <Loaded query={query}>
        {({ runs }) =>
          runs.length === 0 ? (
            <div className="card"><Empty title="No run yet">A run appears here as soon as <code>Trainer.fit</code> begins. Rollouts that belong to no run are under Rollouts.</Empty></div>
          ) : (
            <div className="card scroll-x" tabIndex={0}>
              <table className="list">
                <thead>
                  <tr>
                    <th><span className="skip">Compare</span></th><th>Run</th><th>Status</th><th>Model</th><th>Progress</th>
                    <th>Reward <span className="muted">over steps</span></th><th className="num">Reward</th><th className="num">Validation</th><th className="num">Started</th><th className="num">Took</th>
                  </tr>
                </thead>
                <tbody>{runs.map((run) => <Row key={run.run_id} run={run} chosen={chosen.includes(run.run_id)} toggle={() => toggle(run.run_id)} />)}</tbody>
              </table>
            </div>
          )
        }
      </Loaded>
    </>
  );
}

function Row({ run, chosen, toggle }: { run: ListedRun; chosen: boolean; toggle: () => void }) {
  const [, go] = useLocation();
  const href = `/runs/${encodeURIComponent(run.run_id)}`;
  const validated = run.validated.length ? run.validated[run.validated.length - 1][1] : null;
  return (
    <tr className="go" onClick={() => go(href)}>
      <td onClick={(event) => event.stopPropagation()}><Checkbox size="xs" checked={chosen} onChange={toggle} aria-label={`Compare ${run.name}`} /></td>
      <td><Link href={href} className="link" onClick={(e) => e.stopPropagation()}><b>{textOf(run.name)}</b></Link>{run.elsewhere && <span className="muted" title={`${run.elsewhere} has a store of its own`}> ↗</span>}<div className="small muted keep">{run.algorithm} {run.agent}</div></td>
      <td><StandingBadge value={run.standing} /></td>
      <td className="small">{modelName(run.model)}</td>
      <td className="small"><Progress done={run.steps_done} of={run.steps} /></td>
      <td><Spark series={[{ name: "training", color: "var(--accent)", points: run.curve }, { name: "validation", color: "var(--hot)", points: run.validated, dots: true }]} /></td>
      <td className="num"><RewardNumber value={run.reward} /></td>
      <td className="num"><RewardNumber value={validated} /></td>
      <td className="num small keep" title={moment(run.start_time)}>{ago(run.start_time)}</td>
      <td className="num small">{run.end_time ? seconds(run.end_time - run.start_time) : "–"}{run.end_time && run.resumed && <div className="muted">since resumed</div>}</td>
    </tr>
  );
}

export function modelName(model: string | null | undefined): string {
  return model ? model.split("/").slice(-2).join("/") : "–";
}

export function Progress({ done, of }: { done: number | null; of: number | null }) {
  if (done === null) return <span className="muted">–</span>;
  return (
    <span className="row" style={{ gap: 8 }}>
      {of !== null && <span className="bar" aria-hidden><i style={{ width: `${Math.min(100, (100 * done) / of)}%` }} /></span>}
      <span className="keep" style={{ whiteSpace: "nowrap" }}>{amount(done)}{of !== null ? ` / ${amount(of)}` : ""}</span>
    </span>
  );
}
