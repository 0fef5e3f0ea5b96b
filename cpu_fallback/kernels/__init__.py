"""The CPU's compiled path: LLVM vector code written from Python, weights in panels, a forward pass as one program.

compilation: choice of a target; target: instruction sets and the cache of machine code; image: loading it; layouts: weights and
activations in memory; panels: weights in their layout; emit: LLVM code from Python; arithmetic, embedding: kernels; program: operations as
data; lowering: the model's forward as programs; workspace: buffers; team: threads; runner: execution. All but `compilation`
are imported when a model is loaded. Without llvmlite the model runs in NumPy.
"""
