"""The fields of Google's Gemini API, by their names in camelCase; names in snake_case mean the same."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Unavailable
from agentlightning.gateway.dialects.tables.common import HOSTED, STATE
from agentlightning.types.call import MEDIA

_NO_SPEECH = Unavailable("this model writes text only")
FIELDS = Fields(
    honoured=(
        "model",
        "stream",
        "alt",
        "contents",
        "systemInstruction",
        "tools",
        "toolConfig",
        "generationConfig",
        "generateContentRequest",
    ),
    harmless=("safetySettings", "labels", "serviceTier", "store", "modelArmorConfig"),
    unavailable={
        "cachedContent": Unavailable(STATE, needed=True),
        "continuationToken": Unavailable(STATE, needed=True),
        "generationOutputConfig": _NO_SPEECH,
    },
)
GENERATION = Fields(
    honoured=(
        "candidateCount",
        "frequencyPenalty",
        "logprobs",
        "maxOutputTokens",
        "presencePenalty",
        "responseFormat",
        "responseJsonSchema",
        "responseLogprobs",
        "responseMimeType",
        "responseSchema",
        "seed",
        "stopSequences",
        "temperature",
        "thinkingConfig",
        "topK",
        "topP",
    ),
    harmless=(
        "audioTimestamp",
        "audioTranscriptionConfig",
        "enableAffectiveDialog",
        "enableEnhancedCivicAnswers",
        "mediaResolution",
        "modelSelectionConfig",
        "routingConfig",
    ),
    unavailable={
        "imageConfig": _NO_SPEECH,
        "responseModalities": Unavailable("this model writes text only", neutral=(["TEXT"], [])),
        "speechConfig": _NO_SPEECH,
        "translationConfig": _NO_SPEECH,
    },
)
THINKING = Fields(honoured=("includeThoughts", "thinkingBudget", "thinkingLevel"))
CONTENT = Fields(honoured=("role", "parts"))
PART = Fields(
    honoured=("text", "thought", "thoughtSignature", "functionCall", "functionResponse"),
    harmless=(
        *("mediaProcessing", "mediaResolution", "partMetadata"),
        *("audioMetadata", "documentMetadata", "speechMetadata", "spreadsheetMetadata", "videoMetadata"),
    ),
    unavailable={
        **dict.fromkeys(("inlineData", "fileData", "audioTranscription"), Unavailable(MEDIA)),
        **dict.fromkeys(("executableCode", "codeExecutionResult", "toolCall", "toolResponse"), Unavailable(HOSTED)),
    },
)
CALL = Fields(honoured=("id", "name", "args"), harmless=("partialArgs", "willContinue"))
RESULT = Fields(
    honoured=("id", "name", "response"),
    harmless=("scheduling", "willContinue"),
    unavailable={"parts": Unavailable(MEDIA, neutral=([],))},
)
TOOL = Fields(
    honoured=("functionDeclarations",),
    unavailable=dict.fromkeys(
        (
            "codeExecution",
            "computerUse",
            "enterpriseWebSearch",
            "exaAiSearch",
            "fileSearch",
            "googleMaps",
            "googleSearch",
            "googleSearchRetrieval",
            "mcpServers",
            "parallelAiSearch",
            "retrieval",
            "urlContext",
        ),
        Unavailable(HOSTED),
    ),
)
DECLARATION = Fields(
    honoured=("name", "description", "parameters", "parametersJsonSchema"),
    harmless=("behavior", "response", "responseJsonSchema"),
)
TOOL_CONFIG = Fields(
    honoured=("functionCallingConfig",), harmless=("includeServerSideToolInvocations", "retrievalConfig")
)
CALLING = Fields(honoured=("mode", "allowedFunctionNames"), harmless=("streamFunctionCallArguments",))
FORMAT = Fields(
    honoured=("text",),
    unavailable=dict.fromkeys(("audio", "image", "video"), _NO_SPEECH),
)
FORMAT_TEXT = Fields(honoured=("mimeType", "jsonSchema", "schema"))
NESTED = {
    "contents[]": CONTENT,
    "contents[].parts[]": PART,
    "contents[].parts[].functionCall": CALL,
    "contents[].parts[].functionResponse": RESULT,
    "systemInstruction": CONTENT,
    "tools[]": TOOL,
    "tools[].functionDeclarations[]": DECLARATION,
    "toolConfig": TOOL_CONFIG,
    "toolConfig.functionCallingConfig": CALLING,
    "generationConfig": GENERATION,
    "generationConfig.thinkingConfig": THINKING,
    "generationConfig.responseFormat[]": FORMAT,
    "generationConfig.responseFormat[].text": FORMAT_TEXT,
}
