"""Read training data: how a row gets from the disk to the device.

1. `dataset` finds the files of `data:`, cleans them if `data.clean` is set (`cleaning`), checks the first rows and
   splits off the rows that are held out.
2. `readers` reads each file strictly, row by row, with file and line; `schema` gives a row its meaning, or refuses it.
3. `chat_template` returns a row as token ids and a mask of what is learnt: a `Document`. `mask` renders chats, and
   proves which characters the assistant wrote.
4. `tokenize` does that once for all rows, in worker processes (`pool`), into memory-mapped shards; with `data.stream`
   for a few rows at a time, and keeps nothing.
5. A `samples.SampleSource` has samples by number, cut to T: views on shards.
6. `packing` lays a window of samples out in rows of at most T tokens.
7. `sampler` orders samples, windows and rows by seed alone, and gives each rank the micro-batches of a step.
8. `batch` collates rows into tensors on the host; `Trainer.forward_backward` copies them to the device by `Batch.to`.
"""
