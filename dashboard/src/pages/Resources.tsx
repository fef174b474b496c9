// Resources with their versions, and what changed from one to the next.

import { useState } from "react";
import { useData } from "../api.ts";
import { moment, textOf } from "../format.ts";
import { Id } from "../parts/Copy.tsx";
import { Diff } from "../parts/Diff.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import type { ResourcesVersion } from "../types.ts";

export default function Resources() {
  const query = useData<{ resources: ResourcesVersion[]; total: number }>("/resources");
  return (
    <>
      <div className="head"><div><h1>Resources</h1><div className="head-facts">The endpoints and prompts that agents are given, and what an algorithm tunes. Each change is a new version.</div></div></div>
      <Loaded query={query}>
        {({ resources }) => resources.length === 0 ? <div className="card"><Empty title="No resources yet" /></div> : <Versions versions={resources} />}
      </Loaded>
    </>
  );
}

function Versions({ versions }: { versions: ResourcesVersion[] }) {
  const linked = decodeURIComponent(location.hash.slice(1));
  const [at, setAt] = useState(Math.max(0, versions.findIndex((one) => one.resources_id === linked)));
  const chosen = versions[at];
  const before = versions[at + 1];
  return (
    <div className="sided">
      <div className="card scroll-x" tabIndex={0}>
        <table className="list">
          <thead><tr><th>Version</th><th className="num">Set</th></tr></thead>
          <tbody>
            {versions.map((one, index) => (
              <tr key={one.resources_id} className={`go ${index === at ? "at" : ""}`} onClick={() => setAt(index)}>
                <td><button type="button" style={{ all: "unset", cursor: "pointer" }} className="mono" onClick={() => setAt(index)}>{one.resources_id.slice(-10)}</button><div className="small muted">{Object.keys(one.resources).join(", ")}</div></td>
                <td className="num small muted">{moment(one.update_time)}<div>v{one.version}</div></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <div className="stack">
        <div className="row wrap small muted">Version <Id value={chosen.resources_id} whole />{before && <span>compared with the one before</span>}</div>
        {Object.entries(chosen.resources).map(([name, resource]) => (
          <section key={name} className="card" aria-label={name}>
            <div className="filters"><h2>{textOf(name)}</h2><span className="badge">{textOf(resource.resource_type)}</span></div>
            <div style={{ padding: "10px 0" }}><Diff before={before?.resources[name] ? told(before.resources[name]) : null} after={told(resource)} /></div>
          </section>
        ))}
        {before && Object.keys(before.resources).filter((name) => !(name in chosen.resources)).map((name) => <div key={name} className="card card-pad small"><b>{name}</b> was removed.</div>)}
      </div>
    </div>
  );
}

/** A resource as lines: a prompt's text as it is, the other fields as JSON. */
function told(resource: Record<string, unknown>): string {
  return Object.entries(resource)
    .filter(([name]) => name !== "resource_type")
    .map(([name, value]) => (typeof value === "string" && value.includes("\n") ? `${name}:\n${value}` : `${name}: ${typeof value === "string" ? value : JSON.stringify(value, null, 2)}`))
    .join("\n");
}
