"""Pods of a Kubernetes cluster, through the `kubernetes_asyncio` package."""
