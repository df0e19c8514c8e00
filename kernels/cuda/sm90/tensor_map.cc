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
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeFunction>(function);
}

}  // namespace

Status EncodeTensorMap(const char* field, const Tensor4& t, const std::array<int64_t, 4>& sizes,
                       DType dtype, int box_tokens, CUtensorMap* map) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) {
    return Fail(Status::kUnavailable, "the driver has no cuTensorMapEncodeTiled");
  }
  cuuint64_t dims[4], strides[3];
  const int64_t steps[3] = {t.token_stride, t.head_stride, t.batch_stride};
  for (int i = 0; i < 4; ++i) dims[i] = static_cast<cuuint64_t>(sizes[i]);
  for (int i = 0; i < 3; ++i) {
    // The stride of a dimension of one is never used, but must be legal.
    strides[i] = static_cast<cuuint64_t>(sizes[i + 1] == 1 ? sizes[0] : steps[i]) * 2;
  }
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(t.data), dims, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Fail(Status::kUnsupported, "%s has strides that the copy engine refuses (error %d)",
                field, static_cast<int>(result));
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cuda::sm90
