// The table of rollouts. Filters and pages are in the address, so that it can be sent to somebody; the server finds.

import { Button, NativeSelect, NumberInput, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { useEffect, useState } from "react";
import { useLocation, useSearchParams } from "wouter";
import { useData, withParams } from "../api.ts";
import { ago, amount, moment, seconds, visible } from "../format.ts";
import { RewardNumber, Status, useRange } from "../parts/Badges.tsx";
import { Icon } from "../parts/Icons.tsx";
import { Empty, Failure, Loading } from "../parts/States.tsx";
import { differing, fieldsOf, shownTasks } from "../tasks.ts";
import type { ListedRollout } from "../types.ts";

const FILTERS = ["q", "mode", "outcome", "status", "step", "group", "reward_min", "reward_max"] as const;
const OUTCOMES = ["ok", "truncated", "agent_error", "infra_error", "judge_error", "timeout", "cancelled"];
const STATUSES = ["queuing", "preparing", "running", "succeeded", "failed", "cancelled", "requeuing"];

export default function RolloutsPage({ run }: { run: string | null }) {
  const [params, setParams] = useSearchParams();
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params.get(name)]));
  const sorting = { sort: params.get("sort"), order: params.get("order") };
  const asked = { run, ...filters };
  const page = useData<{ rollouts: ListedRollout[]; next: string | null }>(withParams("/rollouts", { ...asked, ...sorting, cursor: params.get("cursor"), limit: 50 }), { keep: true });
  const count = useData<{ count: number }>(withParams("/rollouts/count", asked), { keep: true });
  const set = (changes: Record<string, string | null>, replace = true) =>
    setParams((now) => {
      const next = new URLSearchParams(now);
      if (!("cursor" in changes || "field" in changes)) next.delete("cursor");
      for (const [name, value] of Object.entries(changes)) value ? next.set(name, value) : next.delete(name);
      return next;
    }, { replace });
  const isFiltered = FILTERS.some((name) => filters[name]);
  const tasks = (page.data?.rollouts ?? []).map((one) => fieldsOf(one.task));
  const names = [...new Set(tasks.flatMap((task) => Object.keys(task)))].filter(Boolean);
  const field = params.get("field") ?? differing(tasks);
  const table = (
    <div className="card">
      <Filters filters={filters} set={set} isFiltered={isFiltered} clear={() => set(Object.fromEntries(FILTERS.map((name) => [name, null])))} />
      {page.data ? (
        page.data.rollouts.length === 0 ? (
          <Empty title={isFiltered ? "No rollout matches the filters" : "No rollout yet"}>{isFiltered ? "Widen a filter." : "Rollouts appear as soon as they are queued."}</Empty>
        ) : (
          <Table rollouts={page.data.rollouts} tasks={shownTasks(tasks, field)} field={field} names={names} run={run} sorting={sorting} set={set} />
        )
      ) : page.error ? <Failure error={page.error} /> : <Loading />}
      <div className="pager">
        <span role="status">{count.data ? `${amount(count.data.count)} ${count.data.count === 1 ? "rollout" : "rollouts"}${isFiltered ? " found" : ""}` : "counting…"} <span className="muted">· <kbd>j</kbd> <kbd>k</kbd> move, <kbd>Enter</kbd> opens, <kbd>/</kbd> searches</span></span>
        <span className="row">
          {params.get("cursor") && <Button size="compact-sm" variant="default" onClick={() => set({ cursor: null }, false)}>First page</Button>}
          <Button size="compact-sm" variant="default" disabled={!page.data?.next} onClick={() => set({ cursor: page.data?.next ?? null }, false)}>Next page</Button>
        </span>
      </div>
    </div>
  );
  if (run !== null) return table;
  return (<><div className="head"><h1>Rollouts</h1></div>{table}</>);
}

type Set = (changes: Record<string, string | null>, replace?: boolean) => void;

function Filters({ filters, set, isFiltered, clear }: { filters: Record<string, string | null>; set: Set; isFiltered: boolean; clear: () => void }) {
  const [text, setText] = useState(filters.q ?? "");
  useEffect(() => setText(filters.q ?? ""), [filters.q]);
  const search = useDebouncedCallback((value: string) => set({ q: value || null }), 250);
  const number = (name: string, label: string, width: number, step = 1) => (
    <NumberInput size="xs" w={width} label={label} hideControls step={step} value={filters[name] ?? ""} onChange={(value) => set({ [name]: value === "" ? null : String(value) })} />
  );
  const choice = (name: string, label: string, data: string[]) => (
    <NativeSelect size="xs" w={116} label={label} data={[{ value: "", label: "any" }, ...data.map((value) => ({ value, label: value.replace("_", " ") }))]} value={filters[name] ?? ""} onChange={(event) => set({ [name]: event.currentTarget.value || null })} />
  );
  return (
    <div className="filters" role="search">
      <TextInput id="search" size="xs" style={{ flex: "1 1 150px" }} label="Search" placeholder="Words of the task, or an id" leftSection={<Icon name="search" size={14} />} value={text}
        onChange={(event) => { setText(event.currentTarget.value); search(event.currentTarget.value); }} />
      {choice("mode", "Mode", ["train", "val", "test"])}
      {choice("outcome", "Outcome", OUTCOMES)}
      {choice("status", "Status", STATUSES)}
      {number("step", "Step", 64)}
      {number("reward_min", "Reward from", 94, 0.1)}
      {number("reward_max", "Reward to", 94, 0.1)}
      {filters.group && <Button size="xs" variant="light" onClick={() => set({ group: null })}>Group {filters.group} ✕</Button>}
      {isFiltered && <Button size="xs" variant="subtle" onClick={clear}>Clear</Button>}
    </div>
  );
}

/** Which field of its task a rollout is listed by. */
function FieldChoice({ field, names, set }: { field: string; names: string[]; set: Set }) {
  return (
    <NativeSelect size="xs" variant="unstyled" className="field" aria-label="Field of the task that is shown" value={names.includes(field) ? field : "*"}
      data={[...names.map((name) => ({ value: name, label: visible(name) })), { value: "*", label: "all fields" }]} onChange={(event) => set({ field: event.currentTarget.value }, true)} />
  );
}

function Table({ rollouts, tasks, field, names, run, sorting, set }: { rollouts: ListedRollout[]; tasks: string[]; field: string; names: string[]; run: string | null; sorting: { sort: string | null; order: string | null }; set: Set }) {
  const [, go] = useLocation();
  const [at, setAt] = useState(-1);
  const range = useRange(run);
  const open = (one: ListedRollout) => go(`/rollouts/${encodeURIComponent(one.rollout_id)}`);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.target instanceof HTMLElement && /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
      if (event.metaKey || event.ctrlKey || event.altKey) return;
      if (event.key === "j" || event.key === "k") setAt((now) => Math.max(0, Math.min(rollouts.length - 1, now + (event.key === "j" ? 1 : -1))));
      else if (event.key === "/") { event.preventDefault(); document.getElementById("search")?.focus(); }
      else if (event.key === "Enter" && at >= 0 && document.activeElement === document.body) open(rollouts[at]);
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  });
  const header = (name: string, title: string, right = false, more = "") => {
    const mine = (sorting.sort ?? "start_time") === name;
    const ascending = mine && sorting.order === "asc";
    return (
      <th className={`${right ? "num" : ""} ${more}`} aria-sort={mine ? (ascending ? "ascending" : "descending") : undefined}>
        <button type="button" onClick={() => set({ sort: name, order: mine && !ascending ? "asc" : null })}>{title}{mine ? (ascending ? " ↑" : " ↓") : ""}</button>
      </th>
    );
  };
  return (
    <div className="scroll-x" tabIndex={0}>
      <table className="list">
        <thead>
          <tr><th><span className="row" style={{ gap: 6 }}>Task{names.length > 1 && <FieldChoice field={field} names={names} set={set} />}</span></th>{header("reward", "Reward", true)}<th>Outcome</th>{header("step", "Step", true)}<th className="wide">Group</th><th className="wide">Mode</th><th className="num wide">Took</th>{header("start_time", "Queued", true, "wide")}</tr>
        </thead>
        <tbody>
          {rollouts.map((one, index) => (
            <tr key={one.rollout_id} className={`go ${index === at ? "at" : ""}`} onClick={() => open(one)} ref={index === at ? (row) => row?.scrollIntoView({ block: "nearest" }) : undefined}>
              <td className="task">
                <a href={`/dashboard/rollouts/${encodeURIComponent(one.rollout_id)}`} className="clamp" title={tasks[index]} onClick={(e) => { e.preventDefault(); }}>{tasks[index] || "–"}</a>
                {one.error && <div className="clip small num-bad">{visible(one.error)}</div>}
              </td>
              <td className="num"><RewardNumber value={one.reward} range={range} /></td>
              <td><Status value={one.outcome ?? one.status} /></td>
              <td className="num">{one.step ?? "–"}</td>
              <td className="small muted wide">{one.group ? <button type="button" className="act link" aria-label={`Only group ${one.group}`} onClick={(e) => { e.stopPropagation(); run ? set({ group: one.group }) : go(`/rollouts/${encodeURIComponent(one.rollout_id)}/group`); }}>{one.group}</button> : "–"}</td>
              <td className="small muted wide">{one.mode ?? "–"}</td>
              <td className="num small wide">{one.end_time ? seconds(one.end_time - one.start_time) : "–"}</td>
              <td className="num small muted wide" title={moment(one.start_time)}>{ago(one.start_time)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
