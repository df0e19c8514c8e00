// The C interface: checks sizes, copies fields, calls the C++ kernels.

#include "bellwether/kernels/c_api.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends.h"
#include "c_api_convert.h"
#include "error.h"

namespace {

namespace bk = bellwether::kernels;
using bk::Status;
using bk::c_api::Call;
using bk::c_api::CheckSize;
using bk::c_api::ToDevice;
using bk::c_api::ToEnum;
using bk::c_api::ToTensor;
using bk::c_api::Whole;

static_assert(static_cast<int>(BW_PROBE_STAT_COUNT) == bk::kProbeStatCount);
static_assert(static_cast<int>(BW_PROBE_LOGIT_MAX) == bk::kProbeLogitMax);
static_assert(static_cast<int>(BW_PROBE_NONFINITE_ROWS) == bk::kProbeNonfiniteRows);
static_assert(static_cast<int>(BW_PROBE_DELTA_ERROR_ABS_SUM) == bk::kProbeDeltaErrorAbsSum);
static_assert(static_cast<int>(BW_PROBE_KV_STAT_COUNT) == bk::kProbeKvStatCount);
static_assert(static_cast<int>(BW_LAW_HEAD_STAT_COUNT) == bk::kLawHeadStatCount);
static_assert(static_cast<int>(BW_LAW_KV_STAT_COUNT) == bk::kLawKvStatCount);
static_assert(static_cast<int>(BW_LAW_DK_SUM) == bk::kLawDkSum);
static_assert(static_cast<int>(BW_LAW_ACCUMULATED) == static_cast<int>(bk::LawArithmetic::kAccumulated));
static_assert(static_cast<int>(BW_SHADOW_STAT_COUNT) == bk::kShadowStatCount);
static_assert(static_cast<int>(BW_FACTOR_STAT_COUNT) == bk::kFactorStatCount);
static_assert(static_cast<int>(BW_LAW_PRODUCT_STAT_COUNT) == bk::kLawProductStatCount);
static_assert(static_cast<int>(BW_LAW_PRODUCT_Y_VARIANCE) == bk::kLawProductYVariance);
static_assert(static_cast<int>(BW_LAW_SUM_STAT_COUNT) == bk::kLawSumStatCount);
static_assert(static_cast<int>(BW_TENSOR_STAT_COUNT) == bk::kTensorStatCount);
static_assert(static_cast<int>(BW_TENSOR_LAG_SUM) == bk::kTensorLagSum);
static_assert(static_cast<int>(BW_MOMENT_LAG_STAT_COUNT) == bk::kMomentLagStatCount);
static_assert(static_cast<int>(BW_MODULE_STAT_COUNT) == bk::kModuleStatCount);
static_assert(static_cast<int>(BW_MODULE_TOP) == bk::kModuleTop);
static_assert(static_cast<int>(BW_LAW_NORM_ROW_COUNT) == bk::kLawNormRowCount);
static_assert(static_cast<int>(BW_LAW_NORM_OFF) == bk::kLawNormOff);
static_assert(static_cast<int>(BW_LAW_NORM_FEATURE_COUNT) == bk::kLawNormFeatureCount);
static_assert(static_cast<int>(BW_LAW_LOGIT_STAT_COUNT) == bk::kLawLogitStatCount);
static_assert(static_cast<int>(BW_LAW_EQUAL_STAT_COUNT) == bk::kLawEqualStatCount);
static_assert(BW_LAW_PARTS_MAX == bk::kLawPartsMax && BW_EQUAL_GROUPS == bk::kEqualGroups);
static_assert(static_cast<int>(BW_GRID_F16) == static_cast<int>(bk::Grid::kFloat16));
static_assert(static_cast<int>(BW_BOOL) == static_cast<int>(bk::MaskDType::kBool));
static_assert(static_cast<int>(BW_KERNEL_DEVICE_ERROR) == static_cast<int>(Status::kDeviceError));

Status CheckProbeFlags(const bw_probe_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("causal", c.causal, 0, 1));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("drift_only", c.drift_only, 0, 1));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("top_left", c.top_left, 0, 1));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("mask_by_sample", c.mask_by_sample, 0, 1));
  for (const uint32_t reserved : {uint32_t{c.reserved[0]}, uint32_t{c.reserved[1]}, uint32_t{c.reserved2[0]},
                                  uint32_t{c.reserved2[1]}, c.reserved3}) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", reserved, 0, 0));
  }
  return Status::kOk;
}

bk::ProbeParams ToProbe(const bw_probe_params& c) {
  bk::ProbeParams p;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.batch = c.batch;
  p.heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.q_len = c.q_len;
  p.k_len = c.k_len;
  p.head_dim = c.head_dim;
  p.v_dim = c.v_dim;
  p.q = ToTensor(c.q);
  p.k = ToTensor(c.k);
  p.v = ToTensor(c.v);
  p.o = ToTensor(c.o);
  p.d_o = ToTensor(c.d_o);
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.causal = c.causal != 0;
  p.top_left = c.top_left != 0;
  p.window_right = c.window_right;
  p.ranges = {c.ranges, c.range_batch_stride, c.range_row_stride};
  p.mask = {c.mask,
            ToEnum<bk::MaskDType>(c.mask_dtype),
            c.mask_by_sample != 0,
            c.mask_batch_stride,
            c.mask_head_stride,
            c.mask_row_stride,
            c.mask_key_stride};
  p.visible = {c.visible, c.visible_batch_stride, c.visible_head_stride, c.visible_key_stride};
  p.sinks = c.sinks;
  p.drift_only = c.drift_only != 0;
  p.window = c.window;
  p.rows_per_head = c.rows_per_head;
  p.seed = c.seed;
  p.head_offset = c.head_offset;
  p.stat_stride = c.stat_stride;
  p.out = c.out;
  p.kv_stat_stride = c.kv_stat_stride;
  p.kv_out = c.kv_out;
  p.gate = c.gate;
  return p;
}

Status RunProbe(const bw_probe_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckProbeFlags(c));
  return bk::Probe(ToProbe(c), ToDevice(c.backend, c.stream, c.threads));
}

// What bw_attention_laws_params and bw_attention_shadow_params have in common.
template <typename Run, typename Params>
Status RunOnGradedCall(const Params& c, const Run& run) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSize(c.call));
  const bw_probe_params call = Whole(*c.call);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckProbeFlags(call));
  const bk::GradedAttention graded = {.call = ToProbe(call),
                                      .arithmetic = ToEnum<bk::LawArithmetic>(c.arithmetic),
                                      .d_q = ToTensor(c.d_q),
                                      .d_k = ToTensor(c.d_k),
                                      .d_v = ToTensor(c.d_v)};
  const bk::LawOutputs outputs = {c.stat_stride, c.out, c.kv_stat_stride, c.kv_out};
  return run(graded, outputs, ToDevice(call.backend, call.stream, call.threads));
}

Status RunAttentionLaws(const bw_attention_laws_params& c) {
  return RunOnGradedCall(c, [](const bk::GradedAttention& of, const bk::LawOutputs& outputs, const bk::Device& device) {
    return bk::AttentionLaws({of, outputs}, device);
  });
}

Status RunAttentionShadow(const bw_attention_shadow_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.reserved, 0, 0));
  return RunOnGradedCall(c,
                         [&c](const bk::GradedAttention& of, const bk::LawOutputs& outputs, const bk::Device& device) {
                           return bk::AttentionShadow({of, outputs, c.keys_per_head, c.factors, c.kv_factors}, device);
                         });
}

Status RunKeyLeak(const bw_key_leak_params& c) {
  bk::KeyLeakParams p;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.batch = c.batch;
  p.kv_heads = c.kv_heads;
  p.k_len = c.k_len;
  p.head_dim = c.head_dim;
  p.d_k = ToTensor(c.d_k);
  p.leak_sum = c.leak_sum;
  p.gradient_sum = c.gradient_sum;
  p.gate = c.gate;
  return bk::KeyLeak(p, ToDevice(c.backend, c.stream, c.threads));
}

bk::LawOperand ToOperand(const bw_law_operand& c) {
  bk::LawOperand operand;
  operand.data = c.data;
  operand.dtype = ToEnum<bk::DType>(c.dtype);
  operand.grid = ToEnum<bk::Grid>(c.grid);
  std::copy(c.strides, c.strides + bk::kLawDims, operand.strides);
  return operand;
}

Status RunLawProducts(const bw_law_products_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.reserved, 0, 0));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("count", c.count, 1, bk::kLawProductsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckPointer("products", c.products, alignof(bw_law_product)));
  bk::LawProduct products[bk::kLawProductsMax];
  for (int64_t i = 0; i < c.count; ++i) {
    std::copy(c.products[i].extents, c.products[i].extents + bk::kLawDims, products[i].extents);
    products[i].x = ToOperand(c.products[i].x);
    products[i].y = ToOperand(c.products[i].y);
  }
  bk::LawProductsParams p;
  p.products = products;
  p.count = c.count;
  p.out = c.out;
  return bk::LawProducts(p, ToDevice(c.backend, c.stream, c.threads));
}

Status RunLawSums(const bw_law_sums_params& c) {
  bk::LawSumsParams p;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.data = c.data;
  p.kept = c.kept;
  p.summed = c.summed;
  p.kept_stride = c.kept_stride;
  p.summed_stride = c.summed_stride;
  p.out = c.out;
  return bk::LawSums(p, ToDevice(c.backend, c.stream, c.threads));
}

bk::TensorPart ToPart(const bw_tensor_part& c) { return {c.data, ToEnum<bk::DType>(c.dtype)}; }

// The tensors of a call, in `tensors`.
Status ToTensors(const bw_tensor_stats_params& c, std::vector<bk::TensorOfStep>* tensors, bk::TensorStatsParams* p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.reserved, 0, 0));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("count", c.count, 0, bk::kTensorsMax));
  if (c.count > 0) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckPointer("tensors", c.tensors, alignof(bw_tensor_of_step)));
  }
  tensors->reserve(static_cast<size_t>(c.count));
  for (int64_t i = 0; i < c.count; ++i) {
    const bw_tensor_of_step& t = c.tensors[i];
    for (const bw_tensor_part* part : {&t.grad, &t.weight, &t.before, &t.moment, &t.second}) {
      BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", part->reserved, 0, 0));
    }
    tensors->push_back({t.elements, ToPart(t.grad), ToPart(t.weight), ToPart(t.before), ToPart(t.moment),
                        ToPart(t.second), t.beta2, t.eps, t.steps, t.steps_at});
  }
  *p = {tensors->data(), c.count, c.scale, c.out, c.workspace};
  return Status::kOk;
}

Status RunTensorStats(const bw_tensor_stats_params& c) {
  std::vector<bk::TensorOfStep> tensors;
  bk::TensorStatsParams p;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(ToTensors(c, &tensors, &p));
  return bk::TensorStats(p, ToDevice(c.backend, c.stream, c.threads));
}

Status RunMomentLags(const bw_moment_lags_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("count", c.count, 0, bk::kMomentLagPartsMax));
  if (c.count > 0) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckPointer("parts", c.parts, alignof(bw_moment_lag_part)));
  }
  bk::MomentLagPart parts[bk::kMomentLagPartsMax];
  for (int64_t i = 0; i < c.count; ++i) {
    const bw_moment_lag_part& part = c.parts[i];
    parts[i] = {part.grad,
                part.second,
                ToEnum<bk::DType>(part.grad_dtype),
                ToEnum<bk::DType>(part.second_dtype),
                part.count,
                part.stride,
                part.beta2,
                part.eps,
                part.steps,
                part.steps_at};
  }
  return bk::MomentLags({parts, c.count, c.scale, c.skip, c.out}, ToDevice(c.backend, c.stream, 0));
}

bk::LawMatrix ToMatrix(const bw_law_matrix& c) { return {c.data, ToEnum<bk::DType>(c.dtype), c.row_stride}; }

Status ToParts(const char* field, const bw_law_matrix* parts, uint32_t count, bk::LawParts* gradient) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange(field, count, 1, bk::kLawPartsMax));
  gradient->count = count;
  for (uint32_t i = 0; i < count; ++i) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", parts[i].reserved, 0, 0));
    gradient->parts[i] = ToMatrix(parts[i]);
  }
  return Status::kOk;
}

Status RunLawNorms(const bw_law_norms_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.x.reserved, 0, 0));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.y.reserved, 0, 0));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("centred", c.centred, 0, 1));
  bk::LawNormsParams p;
  p.rows = c.rows;
  p.n = c.n;
  p.x = ToMatrix(c.x);
  p.y = ToMatrix(c.y);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(ToParts("d_x_parts", c.d_x, c.d_x_parts, &p.d_x));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(ToParts("d_y_parts", c.d_y, c.d_y_parts, &p.d_y));
  p.gain = c.gain;
  p.shift = c.shift;
  p.eps = c.eps;
  p.centred = c.centred != 0;
  p.inside = c.inside;
  p.row_stats = c.row_stats;
  p.feature_stats = c.feature_stats;
  p.rest = c.rest;
  return bk::LawNorms(p, ToDevice(c.backend, c.stream, c.threads));
}

Status RunLawLogits(const bw_law_logits_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.reserved, 0, 0));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c.z.reserved, 0, 0));
  return bk::LawLogits({c.rows, c.classes, ToMatrix(c.z), c.out}, ToDevice(c.backend, c.stream, c.threads));
}

Status RunLawEqualRows(const bw_law_equal_rows_params& c) {
  bk::LawEqualRowsParams p;
  p.rows = c.rows;
  p.width = c.width;
  p.data = c.data;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.row_stride = c.row_stride;
  p.column_stride = c.column_stride;
  p.scratch = c.scratch;
  p.scratch_bytes = c.scratch_bytes;
  p.out = c.out;
  return bk::LawEqualRows(p, ToDevice(c.backend, c.stream, c.threads));
}

bk::ModuleStatsParams ToModule(const bw_module_stats_params& c) {
  return {ToEnum<bk::DType>(c.dtype), c.data, c.rows, c.channels, c.row_stride, c.channel_sumsq, c.out, c.workspace};
}

Status RunModuleStats(const bw_module_stats_params& c) {
  return bk::ModuleStats(ToModule(c), ToDevice(c.backend, c.stream, c.threads));
}

bk::SpectralParams ToSpectral(const bw_spectral_params& c) {
  bk::SpectralParams p;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.heads = c.heads;
  p.rows = c.rows;
  p.columns = c.columns;
  p.weight = c.weight;
  p.head_stride = c.head_stride;
  p.row_stride = c.row_stride;
  p.column_stride = c.column_stride;
  p.sigma = c.sigma;
  p.residual = c.residual;
  p.stable_rank = c.stable_rank;
  p.direction = c.direction;
  p.overlap = c.overlap;
  p.gram = c.gram;
  return p;
}

Status RunSpectralNorms(const bw_spectral_params& c) {
  std::vector<bk::SpectralParams> each = {ToSpectral(c)};
  for (const bw_spectral_params* next = c.next; next != nullptr;) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSize(next));
    const bw_spectral_params whole = Whole(*next);
    each.push_back(ToSpectral(whole));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(
        bk::CheckRange("weights", static_cast<int64_t>(each.size()), 1, bk::kSpectralWeightsMax));
    next = whole.next;
  }
  return bk::SpectralNorms(each.data(), static_cast<int64_t>(each.size()), ToDevice(c.backend, c.stream, c.threads));
}

Status RunIncrementRank(const bw_increment_rank_params& c) {
  bk::IncrementRankParams p;
  p.heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.rows = c.rows;
  p.columns = c.columns;
  p.wq = c.wq;
  p.wq_before = c.wq_before;
  p.wk = c.wk;
  p.wk_before = c.wk_before;
  p.q_head_stride = c.q_head_stride;
  p.q_row_stride = c.q_row_stride;
  p.k_head_stride = c.k_head_stride;
  p.k_row_stride = c.k_row_stride;
  p.effective_rank = c.effective_rank;
  return bk::IncrementRank(p, ToDevice(BW_CPU, nullptr, c.threads));
}

Status RunCenterKeys(const bw_center_keys_params& c) {
  bk::CenterKeysParams p;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.batch = c.batch;
  p.kv_heads = c.kv_heads;
  p.k_len = c.k_len;
  p.head_dim = c.head_dim;
  p.k = ToTensor(c.k);
  p.out = const_cast<void*>(c.out.data);  // The C struct serves both ways.
  p.out_batch_stride = c.out.batch_stride;
  p.out_head_stride = c.out.head_stride;
  p.out_token_stride = c.out.token_stride;
  p.cu_seqlens = c.cu_seqlens;
  p.sequences = c.sequences;
  p.visible = {c.visible, c.visible_batch_stride, c.visible_head_stride, c.visible_key_stride};
  return bk::CenterKeys(p, ToDevice(c.backend, c.stream, c.threads));
}

}  // namespace

extern "C" {

uint32_t bw_kernels_abi_version(void) { return (BW_KERNELS_API_VERSION_MAJOR << 16) | BW_KERNELS_API_VERSION_MINOR; }

const char* bw_kernels_last_error(void) { return bk::LastErrorMessage(); }

int bw_kernels_available(uint32_t backend) {
  return backend <= BW_CUDA && bk::IsAvailable(static_cast<bk::Backend>(backend)) ? 1 : 0;
}

bw_kernel_status bw_probe(const bw_probe_params* params) { return Call(params, RunProbe); }

int64_t bw_probe_sampled_row(uint64_t seed, uint64_t batch, uint64_t head, uint64_t stratum, uint64_t strata,
                             uint64_t q_len) {
  if (strata == 0 || strata > q_len || stratum >= strata || q_len > INT32_MAX) return -1;
  return bk::SampledRow(seed, batch, head, stratum, strata, q_len);
}

bw_kernel_status bw_attention_laws(const bw_attention_laws_params* params) { return Call(params, RunAttentionLaws); }

bw_kernel_status bw_attention_shadow(const bw_attention_shadow_params* params) {
  return Call(params, RunAttentionShadow);
}

bw_kernel_status bw_key_leak(const bw_key_leak_params* params) { return Call(params, RunKeyLeak); }

bw_kernel_status bw_law_products(const bw_law_products_params* params) { return Call(params, RunLawProducts); }

bw_kernel_status bw_law_sums(const bw_law_sums_params* params) { return Call(params, RunLawSums); }

uint64_t bw_tensor_stats_workspace_bytes(const bw_tensor_stats_params* params) {
  if (CheckSize(params) != Status::kOk) return 0;
  const bw_tensor_stats_params whole = Whole(*params);
  std::vector<bk::TensorOfStep> tensors;
  bk::TensorStatsParams p;
  return ToTensors(whole, &tensors, &p) == Status::kOk ? bk::TensorStatsWorkspaceBytes(p) : 0;
}

bw_kernel_status bw_tensor_stats(const bw_tensor_stats_params* params) { return Call(params, RunTensorStats); }

bw_kernel_status bw_moment_lags(const bw_moment_lags_params* params) { return Call(params, RunMomentLags); }

uint64_t bw_module_stats_workspace_bytes(const bw_module_stats_params* params) {
  if (CheckSize(params) != Status::kOk) return 0;
  return bk::ModuleStatsWorkspaceBytes(ToModule(Whole(*params)));
}

bw_kernel_status bw_module_stats(const bw_module_stats_params* params) { return Call(params, RunModuleStats); }

bw_kernel_status bw_law_norms(const bw_law_norms_params* params) { return Call(params, RunLawNorms); }

bw_kernel_status bw_law_logits(const bw_law_logits_params* params) { return Call(params, RunLawLogits); }

int64_t bw_law_equal_rows_scratch_bytes(int64_t rows) {
  return rows < 0 || rows > bk::kEqualRowsMax ? 0 : bk::LawEqualRowsScratch(rows);
}

bw_kernel_status bw_law_equal_rows(const bw_law_equal_rows_params* params) { return Call(params, RunLawEqualRows); }

bw_kernel_status bw_spectral_norms(const bw_spectral_params* params) { return Call(params, RunSpectralNorms); }

bw_kernel_status bw_increment_rank(const bw_increment_rank_params* params) { return Call(params, RunIncrementRank); }

bw_kernel_status bw_center_keys(const bw_center_keys_params* params) { return Call(params, RunCenterKeys); }

}  // extern "C"
