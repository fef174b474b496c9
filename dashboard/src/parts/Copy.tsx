// An id that is shown short and copied whole.

import { CopyButton, Tooltip, UnstyledButton } from "@mantine/core";
import { short } from "../format.ts";

export function Id({ value, whole = false }: { value: string; whole?: boolean }) {
  return (
    <CopyButton value={value}>
      {({ copied, copy }) => (
        <Tooltip label={copied ? "Copied" : `Copy ${value}`} openDelay={300}>
          <UnstyledButton className="mono" onClick={(event) => { event.stopPropagation(); copy(); }}>
            {whole ? value : short(value)}
          </UnstyledButton>
        </Tooltip>
      )}
    </CopyButton>
  );
}
