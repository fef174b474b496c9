"""The dashboard: what a store holds, as pages for people. It reads and changes nothing.

`app` answers requests and decides who may ask, `runs`, `rollouts`, `tokens` and `groups` say what a page shows, `news`
tells open pages what changed. The pages themselves are built from `dashboard/` of the repository into `static/`.
"""

from agentlightning import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__)
