#include "bellwether/kernels/law_modules.h"

#include <cmath>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

constexpr int64_t kElementsMax = int64_t{1} << 48;
constexpr int64_t kStrideMax = INT64_MAX / (kTokensMax + 1);

Status CheckMatrix(const char* name, const LawMatrix& matrix, bool empty) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(matrix.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("row_stride", matrix.row_stride, 0, kStrideMax));
  return empty ? Status::kOk : CheckPointer(name, matrix.data, SizeOf(matrix.dtype));
}

Status CheckParts(const char* name, const LawParts& gradient, bool empty) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("parts", gradient.count, 1, kLawPartsMax));
  for (int64_t i = 0; i < gradient.count; ++i) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMatrix(name, gradient.parts[i], empty));
  }
  return Status::kOk;
}

Status CheckShape(const char* rows_name, int64_t rows, const char* columns_name, int64_t columns) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange(rows_name, rows, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange(columns_name, columns, 0, kTokensMax));
  if (rows > 0 && columns > kElementsMax / rows) {
    return Fail(Status::kInvalidArgument, "%s and %s have more than 2^48 elements together", rows_name, columns_name);
  }
  return Status::kOk;
}

}  // namespace

Status LawNorms(const LawNormsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckShape("rows", p.rows, "n", p.n));
  const bool empty = p.rows == 0 || p.n == 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMatrix("x", p.x, empty));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMatrix("y", p.y, empty));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckParts("d_x", p.d_x, empty));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckParts("d_y", p.d_y, empty));
  if (!(p.eps >= 0) || !std::isfinite(p.eps))
    return Fail(Status::kInvalidArgument, "eps is %g, but must be 0 or more", p.eps);
  if (!(p.inside >= 0) || !std::isfinite(p.inside)) {
    return Fail(Status::kInvalidArgument, "inside is %g, but must be 0 or more", p.inside);
  }
  if (empty) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("gain", p.gain, alignof(double)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("shift", p.shift, alignof(double)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("row_stats", p.row_stats, alignof(double)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("feature_stats", p.feature_stats, alignof(double)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("rest", p.rest, alignof(double)));
  if (device.backend == Backend::kCuda) return cuda::LawNorms(p, device.stream);
  return cpu::LawNorms(p, device.threads);
}

Status LawLogits(const LawLogitsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckShape("rows", p.rows, "classes", p.classes));
  const bool empty = p.rows == 0 || p.classes == 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMatrix("z", p.z, empty));
  if (empty) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  if (device.backend == Backend::kCuda) return cuda::LawLogits(p, device.stream);
  return cpu::LawLogits(p, device.threads);
}

Status LawEqualRows(const LawEqualRowsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("rows", p.rows, 0, kEqualRowsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("width", p.width, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("row_stride", p.row_stride, 0, kStrideMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("column_stride", p.column_stride, 0, kStrideMax));
  if (p.rows == 0 || p.width == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("data", p.data, SizeOf(p.dtype)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  if (device.backend != Backend::kCuda) return cpu::LawEqualRows(p, device.threads);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("scratch", p.scratch, alignof(uint64_t)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      CheckRange("scratch_bytes", p.scratch_bytes, LawEqualRowsScratch(p.rows), INT64_MAX));
  return cuda::LawEqualRows(p, device.stream);
}

}  // namespace bellwether::kernels
