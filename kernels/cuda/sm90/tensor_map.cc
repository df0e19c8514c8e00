#include "cuda/sm90/tensor_map.h"

#include <cuda_runtime.h>

#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

EncodeFunction FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kFirstVersion = 12000;  // the driver API that has it
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeFunction>(function);
}

}  // namespace

Status EncodeTensorMap(const char* field, const Tensor4& t, const TensorMapShape& shape, DType dtype, int box_tokens,
                       CUtensorMap* map) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) {
    return Fail(Status::kUnavailable, "the driver has no cuTensorMapEncodeTiled");
  }
  // The stride of a dimension of one is never used, but must be legal.
  const auto bytes = [&](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>(size == 1 ? shape.channels : stride) * 2;
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  cuuint64_t dims[5] = {size(shape.channels), size(shape.tokens), size(shape.batch), 1, size(shape.heads)};
  cuuint64_t strides[4] = {bytes(shape.tokens, t.token_stride), bytes(shape.batch, t.batch_stride), bytes(1, 0),
                           bytes(shape.heads, t.head_stride)};
  if (shape.packed) {
    constexpr cuuint64_t kEnd = cuuint64_t{1} << 30;
    dims[1] = kEnd;
    dims[2] = size(shape.tokens + 1);
    dims[3] = kEnd + 1;
    strides[0] = strides[1] = static_cast<cuuint64_t>(t.token_stride) * 2;
    strides[2] = (cuuint64_t{1} << 34) - strides[0];
  }
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_tokens), 1, 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = encode(map, type, 5, const_cast<void*>(t.data), dims, strides, box, element_strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Fail(Status::kUnsupported, "%s has strides that the copy engine refuses (error %d)", field,
                static_cast<int>(result));
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cuda::sm90
