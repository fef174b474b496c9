// A rollout as people read it: what was said, call by call. All of it is somebody else's text, and shown as text.

import { CopyButton, Spoiler, Tooltip } from "@mantine/core";
import { Link } from "wouter";
import { amount, metric, seconds, textOf } from "../format.ts";
import type { Call, Fork, Message, Part } from "../types.ts";

interface Shown {
  calls: Call[];
  /** Those that went on from one of its states. */
  forks?: Fork[];
  /** What forks it in a terminal, but for `--at`. */
  forkCommand?: string;
  compact?: boolean;
}

export function Conversation({ calls, forks = [], forkCommand, compact = false }: Shown) {
  const numbers = new Map(calls.map((call, index) => [call.call_id, index + 1]));
  return (
    <div className="talk">
      {calls.map((call, index) => (
        <div key={call.call_id} className="talk" id={`call-${index + 1}`}>
          <Branches forks={forks.filter((fork) => fork.call_id === call.call_id)} />
          <Mark call={call} number={index + 1} before={calls[index - 1]} numbers={numbers} compact={compact} command={call.recorded && forkCommand ? `${forkCommand} --at ${call.answered_before}` : undefined} />
          {!compact && <Tools call={call} />}
          {call.input.map((message, n) => <Said key={`i${n}`} message={message} />)}
          {call.output.map((message, n) => <Said key={`o${n}`} message={message} />)}
          {call.error && <pre className="error-box prewrap" role="alert">{textOf(call.error)}</pre>}
        </div>
      ))}
    </div>
  );
}

/** What became of the rollouts that went on from here. */
function Branches({ forks }: { forks: Fork[] }) {
  if (forks.length === 0) return null;
  const rewards = forks.flatMap((fork) => (fork.reward === null ? [] : [fork.reward]));
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  return (
    <div className="call-mark">
      <span className="badge accent">{forks.length} went on from here</span>
      <span>rewards {forks.map((fork, n) => <span key={fork.rollout_id}>{n > 0 && ", "}<Link className="link" href={`/rollouts/${encodeURIComponent(fork.rollout_id)}`}>{fork.reward === null ? textOf(fork.outcome ?? "none") : metric(fork.reward)}</Link></span>)}</span>
      {rewards.length > 1 && <span>mean {metric(mean)}</span>}
    </div>
  );
}

function ForkButton({ command }: { command: string }) {
  return (
    <CopyButton value={command}>
      {({ copied, copy }) => (
        <Tooltip label={copied ? "Copied: paste it into a terminal" : command} openDelay={300}>
          <button type="button" className="act link small" aria-label={copied ? `Copied: ${command}` : `Fork from here: copy ${command}`} onClick={copy}>{copied ? "Copied" : "Fork from here"}</button>
        </Tooltip>
      )}
    </CopyButton>
  );
}

function Mark({ call, number, before, numbers, compact, command }: { call: Call; number: number; before?: Call; numbers: Map<string, number>; compact: boolean; command?: string }) {
  const follows = call.continues === null ? (before ? "begins anew" : null) : call.continues === before?.call_id ? null : `goes on from call ${numbers.get(call.continues) ?? "?"}`;
  return (
    <div className="call-mark">
      <b>Call {number}</b>
      {call.agent && <span className="badge">{textOf(call.agent)}</span>}
      {!call.trained && <span className="badge" title="Recorded, never trained">not trained</span>}
      {follows && <span className="badge warn">{follows}</span>}
      {call.divergence && <span className="badge warn" title={`The history of the calls before was left at token ${call.divergence.position}. ${call.divergence.advice ?? ""}`}>{textOf(call.divergence.cause.replaceAll("_", " "))}: {amount(call.divergence.tokens_lost)} tokens lost</span>}
      {call.finish_reason === "length" && <span className="badge warn">cut off by length</span>}
      {!compact && (call.prompt_tokens !== null || call.response_tokens !== null) && <span>{amount(call.prompt_tokens)} → {amount(call.response_tokens)} tokens</span>}
      {!compact && call.start_time && call.end_time && <span>{seconds(call.end_time - call.start_time)}</span>}
      {!compact && call.versions.length > 0 && <span>weights v{call.versions.join(", v")}</span>}
      {!compact && command && <ForkButton command={command} />}
    </div>
  );
}

function Tools({ call }: { call: Call }) {
  if (!Array.isArray(call.tools) || call.tools.length === 0) return null;
  const named = call.tools.map((tool) => (tool?.function ?? tool) as { name?: string });
  return (
    <div className="msg system">
      <div className="who">Tools</div>
      <details className="body"><summary className="small">{named.map((tool) => textOf(tool.name ?? "tool")).join(", ")}</summary><pre className="prewrap">{textOf(call.tools)}</pre></details>
    </div>
  );
}

const KNOWN = new Set(["system", "user", "assistant", "tool"]);

function Said({ message }: { message: Message }) {
  const role = KNOWN.has(message.role) ? message.role : "system";
  return (
    <div className={`msg ${role}`}>
      <div className="who">{textOf(message.role)}</div>
      <div className="body">
        <Spoiler maxHeight={420} showLabel="Show all" hideLabel="Show less">
          {message.parts.length === 0 ? <span className="muted">(empty)</span> : message.parts.map((part, index) => <PartView key={index} part={part} />)}
        </Spoiler>
      </div>
    </div>
  );
}

function PartView({ part }: { part: Part }) {
  if (part.type === "tool_call")
    return <div className="toolcall"><b>{textOf(part.name)}</b>({textOf(argumentsOf(part.arguments))})</div>;
  if (part.type === "tool_call_response") return <div className="said">{textOf(part.response ?? part.result)}</div>;
  if (part.type === "reasoning") return <div className="reasoning said">{textOf(part.content)}</div>;
  return <div className="said">{textOf(part.content ?? part)}</div>;
}

/** JSON on one line where it is short. */
function argumentsOf(value: unknown): string {
  if (typeof value === "string") return value;
  const text = JSON.stringify(value);
  return text.length < 100 ? text : JSON.stringify(value, null, 2);
}
