import { lazy, Suspense } from "react";
import { Route, Switch } from "wouter";
import { useData } from "./api.ts";
import { useLive } from "./live.ts";
import { Shell } from "./parts/Shell.tsx";
import { Empty, Failure, Loading } from "./parts/States.tsx";
import { Login } from "./pages/Login.tsx";
import { Runs } from "./pages/Runs.tsx";
import type { Session } from "./types.ts";

const RunPage = lazy(() => import("./pages/Run.tsx"));
const Compare = lazy(() => import("./pages/Compare.tsx"));
const RolloutsPage = lazy(() => import("./pages/Rollouts.tsx"));
const RolloutPage = lazy(() => import("./pages/Rollout.tsx"));
const GroupPage = lazy(() => import("./pages/Group.tsx"));
const Resources = lazy(() => import("./pages/Resources.tsx"));
const Workers = lazy(() => import("./pages/Workers.tsx"));

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
            <Empty title="There is no such page">The list of runs is where everything begins.</Empty>
          </Route>
        </Switch>
      </Suspense>
    </Shell>
  );
}
