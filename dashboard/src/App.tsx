import { lazy, Suspense } from "react";
import { Link, Route, Switch } from "wouter";
import { useData } from "./api.ts";
import { useLive } from "./live.ts";
import { Shell } from "./parts/Shell.tsx";
import { Empty, Failure, Loading } from "./parts/States.tsx";
import { Login } from "./pages/Login.tsx";
import { Runs } from "./pages/Runs.tsx";
import type { Session } from "./types.ts";

const parts = {
  Run: () => import("./pages/Run.tsx"),
  Compare: () => import("./pages/Compare.tsx"),
  Rollouts: () => import("./pages/Rollouts.tsx"),
  Rollout: () => import("./pages/Rollout.tsx"),
  Group: () => import("./pages/Group.tsx"),
  Resources: () => import("./pages/Resources.tsx"),
  Workers: () => import("./pages/Workers.tsx"),
};
const RunPage = lazy(parts.Run);
const Compare = lazy(parts.Compare);
const RolloutsPage = lazy(parts.Rollouts);
const RolloutPage = lazy(parts.Rollout);
const GroupPage = lazy(parts.Group);
const Resources = lazy(parts.Resources);
const Workers = lazy(parts.Workers);

/** Load the page of this address while the session is asked for, not after it. */
function loadAhead(): void {
  const pages: [RegExp, () => Promise<unknown>][] = [
    [/^\/rollouts\/[^/]+\/group$/, parts.Group],
    [/^\/rollouts\/[^/]+$/, parts.Rollout],
    [/^\/rollouts$/, parts.Rollouts],
    [/^\/runs\//, parts.Run],
    [/^\/compare$/, parts.Compare],
    [/^\/resources$/, parts.Resources],
    [/^\/workers$/, parts.Workers],
  ];
  const path = window.location.pathname.replace(/^\/dashboard/, "");
  pages.find(([pattern]) => pattern.test(path))?.[1]().catch(() => undefined); // a failure is said where it is shown
}

loadAhead();

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
