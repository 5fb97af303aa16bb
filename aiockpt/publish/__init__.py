"""Publication of weights as versions, and their reception: one committed step feeds evaluation, rollouts and serving.

A version is a Hugging Face folder, or the few bytes that changed since the version before, in the form that slime and
ModelExpress read (docs/guide/publish.md#the-form). `aiockpt.Publish` makes them of committed steps, and `aiockpt.receive`
keeps a folder of another host at the newest one.
"""
