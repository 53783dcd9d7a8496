"""Read training data, from a row on disk to a batch on the device.

1. `dataset` finds the files of `data:`, cleans them if `data.clean` is set (`cleaning`), checks the first rows and
   splits off the held-out rows.
2. `readers` reads each file strictly, row by row, with file and line; `schema` parses or rejects a row.
3. `chat_template` converts a row to token ids and a target mask: a `Document`. `mask` renders chats, and proves which
   characters the assistant wrote.
4. `tokenize` does that once for all rows, in worker processes (`pool`), into memory-mapped shards; with `data.stream`
   for a few rows at a time, without storing them.
5. A `samples.SampleSource` returns samples by number, cut to T: views on shards.
6. `packing` lays a window of samples out in rows of at most T tokens.
7. `sampler` orders samples, windows and rows by seed only, and gives each rank the micro-batches of a step.
8. `batch` collates rows into tensors on the host; `Trainer.forward_backward` copies them to the device by `Batch.to`.
"""
