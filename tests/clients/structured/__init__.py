"""How each package asks for a JSON answer by a schema; the modules of `agents` are about tools."""
