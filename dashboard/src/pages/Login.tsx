import { Button, PasswordInput } from "@mantine/core";
import { type FormEvent, useState } from "react";
import { client, post } from "../api.ts";
import { Bolt } from "../parts/Icons.tsx";

/** Where the server is not on this machine: the store's key opens it. The key goes into one request, and nowhere else. */
export function Login() {
  const [key, setKey] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    setBusy(true);
    try {
      await post("/login", { key });
      await client.invalidateQueries();
    } catch (refused) {
      setError(refused instanceof Error ? refused.message : "This did not work.");
    } finally {
      setBusy(false);
    }
  };
  return (
    <main className="state">
      <form onSubmit={submit} className="card card-pad stack" style={{ maxWidth: 380, margin: "8vh auto", textAlign: "left" }}>
        <div className="row"><Bolt /><h1>Agent Lightning</h1></div>
        <p className="small muted" style={{ margin: 0 }}>This store is served to a network. Its key is what the server was started with (<code>--key</code>, <code>AGL_STORE_KEY</code>).</p>
        <PasswordInput label="Key of the store" value={key} onChange={(e) => setKey(e.currentTarget.value)} error={error} autoFocus required />
        <Button type="submit" loading={busy} disabled={!key}>Log in</Button>
      </form>
    </main>
  );
}
