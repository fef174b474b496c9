import { type ComponentType, lazy, type ReactElement, Suspense, useState } from "react";
import { Link, Route, Switch } from "wouter";
import { useData } from "./api.ts";
import { useLive } from "./live.ts";
import { Shell } from "./parts/Shell.tsx";
import { Empty, Failure, Loading } from "./parts/States.tsx";
import { Login } from "./pages/Login.tsx";
import { Runs } from "./pages/Runs.tsx";
import type { Session } from "./types.ts";

/** A page whose code is a file of its own. */
interface Page<Props> {
  (props: Props): ReactElement;
  load: () => Promise<unknown>;
}

/** What `lazy` makes always suspends first, and React then holds back what it shows for 300 ms: if the file is there
 * when the page is opened, the page is shown at once. */
function page<Props extends object>(load: () => Promise<{ default: ComponentType<Props> }>): Page<Props> {
  let there: ComponentType<Props> | null = null;
  const loaded = () =>
    load().then((file) => {
      there = file.default;
      return file;
    });
  const Later = lazy(loaded) as unknown as ComponentType<Props>;
  const Shown = (props: Props) => {
    const [Content] = useState(() => there ?? Later);
    return <Content {...props} />;
  };
  return Object.assign(Shown, { load: loaded });
}

const RunPage = page(() => import("./pages/Run.tsx"));
const Compare = page(() => import("./pages/Compare.tsx"));
const RolloutsPage = page(() => import("./pages/Rollouts.tsx"));
const RolloutPage = page(() => import("./pages/Rollout.tsx"));
const GroupPage = page(() => import("./pages/Group.tsx"));
const Resources = page(() => import("./pages/Resources.tsx"));
const Workers = page(() => import("./pages/Workers.tsx"));

const PAGES: [RegExp, () => Promise<unknown>][] = [
  [/^\/rollouts\/[^/]+\/group$/, GroupPage.load],
  [/^\/rollouts\/[^/]+$/, RolloutPage.load],
  [/^\/rollouts$/, RolloutsPage.load],
  [/^\/runs\//, RunPage.load],
  [/^\/compare$/, Compare.load],
  [/^\/resources$/, Resources.load],
  [/^\/workers$/, Workers.load],
];

/** Load the page of this address while the session is asked for, and the others when there is nothing else to do. */
async function loadAhead(): Promise<void> {
  const path = window.location.pathname.replace(/^\/dashboard/, "");
  try {
    await PAGES.find(([pattern]) => pattern.test(path))?.[1]();
    for (const [, load] of PAGES) {
      await new Promise((resolve) => ("requestIdleCallback" in window ? requestIdleCallback(resolve) : setTimeout(resolve, 200)));
      await load();
    }
  } catch {
    // a failure is said where the page is shown
  }
}

void loadAhead();

export function App() {
  const session = useData<Session>("/session");
  if (session.isPending) return <Loading />;
  if (session.isError) return <Failure error={session.error} />;
  if (!session.data.allowed) return <Login />;
  return <Pages session={session.data} />;
}

function Pages({ session }: { session: Session }) {
  useLive();
  return (
    <Shell session={session}>
      <Suspense fallback={<Loading />}>
        <Switch>
          <Route path="/" component={Runs} />
          <Route path="/compare" component={Compare} />
          <Route path="/rollouts">{() => <RolloutsPage run={null} />}</Route>
          <Route path="/rollouts/:rollout">{(p) => <RolloutPage id={decodeURIComponent(p.rollout)} />}</Route>
          <Route path="/rollouts/:rollout/group">{(p) => <GroupPage id={decodeURIComponent(p.rollout)} />}</Route>
          <Route path="/resources" component={Resources} />
          <Route path="/workers" component={Workers} />
          <Route path="/runs/:run/:tab?">
            {(p) => <RunPage id={decodeURIComponent(p.run)} tab={p.tab ?? "overview"} />}
          </Route>
          <Route>
            <Empty title="There is no such page"><Link className="link" href="/">The list of runs</Link> is where everything begins.</Empty>
          </Route>
        </Switch>
      </Suspense>
    </Shell>
  );
}
