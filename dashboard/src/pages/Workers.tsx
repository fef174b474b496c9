// The workers, what each of them runs, and the queue.

import { Link } from "wouter";
import { useData } from "../api.ts";
import { ago, amount, short, textOf } from "../format.ts";
import { Status } from "../parts/Badges.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import type { WorkersView } from "../types.ts";

export default function Workers() {
  const query = useData<WorkersView>("/workers");
  return (
    <>
      <div className="head"><h1>Workers and queue</h1></div>
      <Loaded query={query}>
        {(view) => (
          <div className="stack">
            <div className="queue">
              {["queuing", "requeuing", "preparing", "running", "succeeded", "failed", "cancelled"].map((name) => (
                <Link key={name} href={`/rollouts?status=${name}`} className="card tile"><div className="label">{name}</div><div className="metric-now">{amount(view.rollouts[name] ?? 0)}</div></Link>
              ))}
            </div>
            <p className="small muted" style={{ margin: 0 }}>{amount(view.calls)} model calls and {amount(view.spans)} spans are recorded.</p>
            <div className="card scroll-x" tabIndex={0}>
              {view.workers.length === 0 ? <Empty title="No worker yet" /> : (
                <table className="list">
                  <thead><tr><th>Worker</th><th>Status</th><th>Rollout</th><th className="num">Last heard from</th><th className="num">Last busy</th><th>Details</th></tr></thead>
                  <tbody>
                    {view.workers.map((one) => (
                      <tr key={one.worker_id}>
                        <td className="mono">{textOf(one.worker_id)}</td>
                        <td><Status value={one.status} /></td>
                        <td>{one.current_rollout_id ? <Link className="link mono" href={`/rollouts/${encodeURIComponent(one.current_rollout_id)}`}>{short(one.current_rollout_id)}</Link> : <span className="muted">–</span>}</td>
                        <td className="num small">{ago(one.last_heartbeat_time)}</td>
                        <td className="num small">{ago(one.last_busy_time)}</td>
                        <td className="mono">{one.heartbeat_stats ? textOf(JSON.stringify(one.heartbeat_stats)) : "–"}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              )}
            </div>
          </div>
        )}
      </Loaded>
    </>
  );
}
