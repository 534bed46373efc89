"""Dense peak throughputs of GPUs, from NVIDIA's data sheets; read without torch."""

# FLOP/s (for int8, operations/s) by the dtype of a GEMM that sums in float32, without the sparsity with which data
# sheets mostly print twice as much. A device has the peaks of the first name that is part of its own. GeForce cards
# sum products of 8 bits in float32 at half of the speed that their sheets print first.
PEAKS: dict[str, dict[str, float]] = {
    "GB200": {"bfloat16": 2.5e15, "float8": 5.0e15, "int8": 5.0e15, "float4": 10.0e15},
    "B200": {"bfloat16": 2.25e15, "float8": 4.5e15, "int8": 4.5e15, "float4": 9.0e15},
    "H200 NVL": {"bfloat16": 835.5e12, "float8": 1671e12, "int8": 1671e12},
    "H200": {"bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12},
    "H100 NVL": {"bfloat16": 835.5e12, "float8": 1671e12, "int8": 1671e12},
    "H100 PCIe": {"bfloat16": 756e12, "float8": 1513e12, "int8": 1513e12},
    "H100": {"bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12},
    "A100": {"bfloat16": 312e12, "int8": 624e12},
    "L40S": {"bfloat16": 362e12, "float8": 733e12, "int8": 733e12},
    "L4": {"bfloat16": 121e12, "float8": 242e12, "int8": 242e12},
    "RTX 6000 Ada": {"bfloat16": 364e12, "float8": 728e12, "int8": 728e12},
    "RTX 4090": {"bfloat16": 165.2e12, "float8": 330.3e12, "int8": 660.6e12},
    "RTX PRO 6000 Blackwell": {"bfloat16": 504e12, "float8": 1008e12, "int8": 1008e12, "float4": 2015e12},
    "RTX 5090": {"bfloat16": 209.5e12, "float8": 419e12, "int8": 838e12, "float4": 1676e12},
}
