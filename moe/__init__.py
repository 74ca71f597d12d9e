"""The mixture of experts: routers, routed experts and the shared expert."""
