"""Code that runs inside a cache server or an engine: counts loads, admits or denies them."""
