"""The CPU's compiled path: LLVM vector code written from Python, weights in panels, a forward pass
as one program.

Without llvmlite the model runs in NumPy. All files but `compilation` are imported with a model.

    compilation               choice of an instruction set
    target, image             instruction sets, the cache of machine code, and loading it
    emit                      LLVM code from Python
    layouts, panels, panel_files, filling     weights and activations in memory; packing weights
    codes, products, unpacked, packing, norms, rope, paging, attention, routing, embedding     kernels
    recipe, records, operations, interpreter, program     a forward as data, and the code that executes it
    lowering, ops, workspace  core's forward as programs, and their buffers
    team, runner              threads, and the calls of a model
    bus_errors                a handler that survives truncated weights
    search                    scales of quantisers to GGUF's types
    candidates, profile       measurements
"""  # noqa: E501
