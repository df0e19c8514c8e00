// Goal: the C interface refuses every illegal argument with a sentence that
// names field, value and legal range, writes nothing then, and otherwise does
// what the C++ kernels do.
// Method: one legal call per function; each case breaks one field.  Limits are
// tried at max and max + 1.

#include "bellwether/kernels/c_api.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/kernels/attention_c_api.h"
#include "bellwether/kernels/probe.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr float kMark = 7;

struct ProbeCall {
  ProbeCall() {
    p.struct_size = sizeof(p);
    p.batch = 1;
    p.heads = 2;
    p.kv_heads = 1;
    p.q_len = p.k_len = 3;
    p.head_dim = p.v_dim = 4;
    p.q = p.k = p.v = p.o = p.d_o = {data.data(), 0, 0, 4};
    p.scale = 0.5f;
    p.stat_stride = 2;
    p.out = out.data();
    p.kv_stat_stride = 1;
    p.kv_out = kv_out.data();
    out.fill(kMark);
    kv_out.fill(kMark);
  }
  std::array<float, 16> data{};
  std::array<float, 2 * BW_PROBE_STAT_COUNT> out;
  std::array<float, BW_PROBE_KV_STAT_COUNT> kv_out;
  bw_probe_params p{};
};

struct Break {
  std::function<void(bw_probe_params&)> change;
  bw_kernel_status status;
  std::string sentence;
};

TEST(KernelsCApiTest, ProbeNamesTheBadArgument) {
  constexpr bw_kernel_status kInvalid = BW_KERNEL_INVALID_ARGUMENT;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Break> breaks = {
      {[](auto& p) { p.struct_size = 8; }, kInvalid, "struct_size is 8, but must be at least"},
      {[](auto& p) { p.backend = 2; }, kInvalid, "backend is 2, but must be 0..1"},
      {[](auto& p) { p.backend = 0xffffffff; }, kInvalid, "backend is 2147483647, but must be 0..1"},
      {[](auto& p) { p.dtype = 3; }, kInvalid, "dtype is 3, but must be 0..2"},
      {[](auto& p) { p.threads = 257; }, kInvalid, "threads is 257, but must be 0..256"},
      {[](auto& p) { p.batch = -1; }, kInvalid, "batch is -1, but must be 0..1048576"},
      {[](auto& p) { p.batch = (1 << 20) + 1; }, kInvalid, "batch is 1048577, but must be 0..1048576"},
      {[](auto& p) { p.heads = 0; }, kInvalid, "heads is 0, but must be 1..65536"},
      {[](auto& p) { p.heads = 65537; }, kInvalid, "heads is 65537, but must be 1..65536"},
      {[](auto& p) { p.kv_heads = 0; }, kInvalid, "kv_heads is 0, but must be 1..2"},
      {[](auto& p) { p.kv_heads = 3; }, kInvalid, "kv_heads is 3, but must be 1..2"},
      {[](auto& p) {
         p.heads = 3;
         p.kv_heads = 2;
       },
       kInvalid, "heads is 3, but must be a multiple of kv_heads 2"},
      {[](auto& p) { p.q_len = -1; }, kInvalid, "q_len is -1, but must be 0..2147483647"},
      {[](auto& p) { p.k_len = int64_t{1} << 31; }, kInvalid, "k_len is 2147483648, but must be 0..2147483647"},
      {[](auto& p) { p.head_dim = 0; }, kInvalid, "head_dim is 0, but must be 1..1024"},
      {[](auto& p) { p.head_dim = 1025; }, BW_KERNEL_UNSUPPORTED, "head_dim is 1025, but only 1..1024 is supported"},
      {[](auto& p) { p.v_dim = 0; }, kInvalid, "v_dim is 0, but must be 1..1024"},
      {[](auto& p) { p.v_dim = 1025; }, BW_KERNEL_UNSUPPORTED, "v_dim is 1025, but only 1..1024 is supported"},
      {[](auto& p) { p.q.data = nullptr; }, kInvalid, "q is NULL"},
      {[](auto& p) { p.k.data = nullptr; }, kInvalid, "k is NULL"},
      {[](auto& p) { p.k.data = static_cast<const char*>(p.k.data) + 1; }, kInvalid,
       "multiple of the element's 4 bytes"},
      {[](auto& p) { p.v.data = nullptr; }, kInvalid, "v is NULL, o is given, d_o is given, but must be all three"},
      {[](auto& p) { p.d_o.data = nullptr; }, kInvalid, "d_o is NULL, but must be all three"},
      {[](auto& p) { p.scale = 0; }, kInvalid, "scale is 0, but must be finite and > 0"},
      {[nan](auto& p) { p.scale = nan; }, kInvalid, "scale is nan, but must be finite and > 0"},
      {[](auto& p) { p.softcap = -1; }, kInvalid, "softcap is -1, but must be finite and >= 0"},
      {[nan](auto& p) { p.softcap = nan; }, kInvalid, "softcap is nan"},
      {[](auto& p) { p.causal = 2; }, kInvalid, "causal is 2, but must be 0..1"},
      {[](auto& p) { p.reserved[1] = 1; }, kInvalid, "reserved is 1, but must be 0..0"},
      {[](auto& p) { p.window = -1; }, kInvalid, "window is -1, but must be 0..2147483647"},
      {[](auto& p) { p.window_right = -1; }, kInvalid, "window_right is -1, but must be 0..2147483647"},
      {[](auto& p) { p.top_left = 2; }, kInvalid, "top_left is 2, but must be 0..1"},
      {[](auto& p) { p.mask_by_sample = 2; }, kInvalid, "mask_by_sample is 2, but must be 0..1"},
      {[](auto& p) { p.reserved2[0] = 1; }, kInvalid, "reserved is 1, but must be 0..0"},
      {[](auto& p) { p.reserved3 = 5; }, kInvalid, "reserved is 5, but must be 0..0"},
      {[](auto& p) { p.mask = p.q.data; }, kInvalid, "visible is NULL, but must be given with ranges or a mask"},
      {[](auto& p) { p.ranges = static_cast<const int32_t*>(p.q.data); }, kInvalid, "visible is NULL"},
      {[](auto& p) {
         p.mask = p.q.data;
         p.mask_dtype = 4;
       },
       kInvalid, "mask_dtype is 4, but must be 0..3"},
      {[](auto& p) {
         p.mask = static_cast<const char*>(p.q.data) + 1;
         p.mask_dtype = BW_F16;
       },
       kInvalid, "mask is"},
      {[](auto& p) { p.sinks = reinterpret_cast<const float*>(static_cast<const char*>(p.q.data) + 2); }, kInvalid,
       "sinks is"},
      {[](auto& p) {
         static const uint64_t open[2] = {1, 0};
         p.mask = p.visible = static_cast<const uint8_t*>(p.q.data);
         p.mask_dtype = BW_BOOL;
         p.mask_by_sample = 1;
         p.gate = open;
       },
       kInvalid, "mask_by_sample is 1, but must be 0 with a gate"},
      {[](auto& p) { p.head_offset = -1; }, kInvalid, "head_offset is -1, but must be 0.."},
      {[](auto& p) { p.stat_stride = 1; }, kInvalid, "stat_stride is 1, but must be 2.."},
      {[](auto& p) { p.out = nullptr; }, kInvalid, "out is NULL"},
      {[](auto& p) { p.kv_stat_stride = 0; }, kInvalid, "kv_stat_stride is 0, but must be 1.."},
  };
  for (const Break& broken : breaks) {
    SCOPED_TRACE(broken.sentence);
    ProbeCall call;
    broken.change(call.p);
    EXPECT_EQ(bw_probe(&call.p), broken.status);
    EXPECT_THAT(bw_kernels_last_error(), HasSubstr(broken.sentence));
    EXPECT_THAT(call.out, Each(kMark)) << "a rejected call must not write";
    EXPECT_THAT(call.kv_out, Each(kMark));
  }
  ProbeCall call;
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.out[2 * BW_PROBE_ROWS], kMark + 3);
  EXPECT_EQ(bw_probe(nullptr), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("params is NULL"));
}

TEST(KernelsCApiTest, TheLargestLegalSizesAreAccepted) {
  ProbeCall call;
  call.p.batch = 0;  // Nothing to read, so that only the limits are tried.
  call.p.q_len = call.p.k_len = 0x7fffffff;
  call.p.head_dim = call.p.v_dim = 1024;
  call.p.threads = 256;
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
  std::vector<float> sigma(1), weight(512);
  bw_spectral_params s{};
  s.struct_size = sizeof(s);
  s.heads = 1;
  s.rows = 512;
  s.columns = 1;
  s.weight = weight.data();
  s.row_stride = 1;
  s.sigma = sigma.data();
  EXPECT_EQ(bw_spectral_norms(&s), BW_KERNEL_OK) << bw_kernels_last_error();
  s.rows = 513;
  EXPECT_EQ(bw_spectral_norms(&s), BW_KERNEL_UNSUPPORTED);
  EXPECT_STREQ(bw_kernels_last_error(), "rows is 513, but only 1..512 is supported");
}

TEST(KernelsCApiTest, WeightsInAChainAreMeasuredAsAlone) {
  std::array<std::array<float, 6>, 3> weights = {{{1, 2, 3, 4, 5, 6}, {0, 1, 0, 0, 0, 2}, {7, 0, 0, 0, 0, 0}}};
  std::array<float, 3> alone = {}, together = {};
  std::array<bw_spectral_params, 3> chain = {};
  for (size_t i = 0; i < chain.size(); ++i) {
    bw_spectral_params& s = chain[i];
    s.struct_size = sizeof(s);
    s.heads = 1;
    s.rows = 2;
    s.columns = s.row_stride = 3;
    s.column_stride = 1;
    s.weight = weights[i].data();
    s.sigma = &alone[i];
    ASSERT_EQ(bw_spectral_norms(&s), BW_KERNEL_OK) << bw_kernels_last_error();
    s.sigma = &together[i];
    if (i > 0) chain[i - 1].next = &s;
  }
  EXPECT_EQ(bw_spectral_norms(chain.data()), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(together, alone);
  EXPECT_NEAR(alone[2], 7, 1e-6);

  // One that is refused: nothing is written.
  together = {};
  chain[2].rows = 513;
  EXPECT_EQ(bw_spectral_norms(chain.data()), BW_KERNEL_UNSUPPORTED);
  EXPECT_EQ(together, (std::array<float, 3>{}));
  // The struct of a header before 1.4 has no `next`.
  chain[0].struct_size = offsetof(bw_spectral_params, next);
  EXPECT_EQ(bw_spectral_norms(chain.data()), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(together, (std::array<float, 3>{alone[0], 0, 0}));
  chain[0].struct_size = sizeof(chain[0]);
  chain[2].rows = 2;
  chain[2].next = &chain[1];  // Round and round.
  EXPECT_EQ(bw_spectral_norms(chain.data()), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_STREQ(bw_kernels_last_error(), "weights is 65537, but must be 1..65536");
}

TEST(KernelsCApiTest, ShutGateWritesNothing) {
  const std::array<uint64_t, 2> shut = {0, 5}, open = {1, 5};
  ProbeCall call;
  call.data.fill(1);
  call.p.gate = shut.data();
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_THAT(call.out, Each(kMark));
  EXPECT_THAT(call.kv_out, Each(kMark));
  std::array<float, 1> leak{}, gradient{};
  bw_key_leak_params k{};
  k.struct_size = sizeof(k);
  k.batch = k.kv_heads = 1;
  k.k_len = 3;
  k.head_dim = 4;
  k.d_k = call.p.k;
  k.leak_sum = leak.data();
  k.gradient_sum = gradient.data();
  k.gate = shut.data();
  EXPECT_EQ(bw_key_leak(&k), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(leak[0], 0);
  k.gate = open.data();
  EXPECT_EQ(bw_key_leak(&k), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_FLOAT_EQ(leak[0], 6);
  call.p.gate = open.data();
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.out[0], kMark + 3);
}

TEST(KernelsCApiTest, AGateGivesTheRowsTheirSeed) {
  std::vector<float> rows(64 * 4);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i * i % 97);
  const auto common_mode = [&](uint64_t seed, const uint64_t* gate) {
    ProbeCall call;
    call.p.q = call.p.k = call.p.v = call.p.o = call.p.d_o = {rows.data(), 0, 0, 4};
    call.p.q_len = call.p.k_len = 64;
    call.p.rows_per_head = 3;
    call.p.seed = seed;
    call.p.gate = gate;
    call.out.fill(0);
    EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
    return call.out[2 * BW_PROBE_COMMON_MODE_SUM];
  };
  const std::array<uint64_t, 2> gate = {1, 40};
  EXPECT_EQ(common_mode(2, gate.data()), common_mode(42, nullptr));
  EXPECT_NE(common_mode(2, nullptr), common_mode(42, nullptr));
}

TEST(KernelsCApiTest, DriftAloneTouchesNothingElse) {
  ProbeCall whole;
  for (size_t i = 0; i < whole.data.size(); ++i) whole.data[i] = static_cast<float>(i % 5);
  ProbeCall drift = whole;
  drift.p.q = drift.p.k = {drift.data.data(), 0, 0, 4};
  drift.p.out = drift.out.data();
  drift.p.kv_out = drift.kv_out.data();
  drift.p.drift_only = 1;
  drift.p.v = drift.p.o = drift.p.d_o = {drift.data.data(), 0, 0, 4};
  EXPECT_EQ(bw_probe(&drift.p), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_STREQ(bw_kernels_last_error(), "v, o and d_o are given, but must be NULL: drift_only is 1");
  drift.p.v = drift.p.o = drift.p.d_o = {};
  EXPECT_EQ(bw_probe(&drift.p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(bw_probe(&whole.p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(drift.kv_out, whole.kv_out);
  for (int stat = 0; stat < BW_PROBE_STAT_COUNT; ++stat) {
    const bool of_drift = stat <= BW_PROBE_SPREAD_SUM || stat == BW_PROBE_NONFINITE_ROWS;
    for (size_t head = 0; head < 2; ++head) {
      const size_t at = 2 * static_cast<size_t>(stat) + head;
      EXPECT_EQ(drift.out[at], of_drift ? whole.out[at] : kMark) << stat;
    }
  }
}

TEST(KernelsCApiTest, ALongerStructMustEndInZeros) {
  ProbeCall call;
  std::vector<unsigned char> bytes(sizeof(bw_probe_params) + 16);
  std::memcpy(bytes.data(), &call.p, sizeof(bw_probe_params));
  auto* p = reinterpret_cast<bw_probe_params*>(bytes.data());
  p->struct_size = static_cast<uint32_t>(bytes.size());
  EXPECT_EQ(bw_probe(p), BW_KERNEL_OK) << bw_kernels_last_error();
  bytes.back() = 1;
  EXPECT_EQ(bw_probe(p), BW_KERNEL_UNSUPPORTED);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("this library is older"));
}

TEST(KernelsCApiTest, AnOlderStructsMissingFieldsAreZero) {
  ProbeCall call;
  call.p.struct_size = offsetof(bw_probe_params, top_left);
  call.p.top_left = 9;  // Behind its end.
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
  --call.p.struct_size;
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("struct_size is"));
}

// Key 2 of three is padding, of which a mask, ranges and the sinks' head know.
TEST(KernelsCApiTest, EveryPartOfAMaskArrives) {
  const std::array<uint8_t, 3> bytes = {1, 1, 0};
  const std::array<int32_t, 3> range = {0, 2, 0};
  const std::array<float, 2> sinks = {0, 0};
  for (int part = 0; part < 3; ++part) {
    ProbeCall call;
    call.out.fill(0);
    call.p.visible = bytes.data();
    call.p.visible_key_stride = 1;
    if (part == 0) {
      call.p.mask = bytes.data();
      call.p.mask_dtype = BW_BOOL;
      call.p.mask_key_stride = 1;
    } else {
      call.p.ranges = range.data();
    }
    if (part == 2) call.p.sinks = sinks.data();
    EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
    // Scores are 0: P is 1 over the keys that are seen, and the sink.
    EXPECT_FLOAT_EQ(call.out[2 * BW_PROBE_SINK_SUM], part == 2 ? 1.0f : 1.5f) << part;
  }
  ProbeCall call;
  call.out.fill(0);
  call.p.top_left = 1;
  call.p.window_right = 1;
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_FLOAT_EQ(call.out[2 * BW_PROBE_SINK_SUM], 1 + 1 / 2.0f + 1 / 3.0f);
}

// Two rows and two keys of one head; v is 1 and 3.
struct AttentionCall {
  AttentionCall() {
    f.struct_size = sizeof(f);
    f.mode = BW_ATTENTION_FA;
    f.batch = f.heads = f.kv_heads = 1;
    f.q_len = f.k_len = 2;
    f.head_dim = 1;
    f.q = {q.data(), 0, 0, 1};
    f.k = {k.data(), 0, 0, 1};
    f.v = {v.data(), 0, 0, 1};
    f.o = {o.data(), 0, 0, 1};
    f.lse = lse.data();
    f.scale = 1;
  }
  bw_attention_backward_params Backward() {
    bw_attention_backward_params b{};
    b.struct_size = sizeof(b);
    b.forward = f;
    b.d_o = {d_o.data(), 0, 0, 1};
    b.dq = {dq.data(), 0, 0, 1};
    b.dk = {dk.data(), 0, 0, 1};
    b.dv = {dv.data(), 0, 0, 1};
    return b;
  }
  std::array<float, 2> q{1, 1}, k{0, 0}, v{1, 3}, o{}, lse{}, d_o{1, 1}, dq{}, dk{}, dv{};
  bw_attention_forward_params f{};
};

TEST(KernelsCApiTest, EveryPartOfAnAttentionsMaskArrives) {
  const std::array<uint8_t, 4> bytes = {1, 0, 1, 1};
  const std::array<int32_t, 2> bounds = {1, 2};
  const float sink = 0;
  AttentionCall call;
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.o, (std::array<float, 2>{2, 2}));
  call.f.mask = bytes.data();
  call.f.mask_dtype = BW_BOOL;
  call.f.mask_row_stride = 2;
  call.f.mask_key_stride = 1;
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.o, (std::array<float, 2>{1, 2}));
  call.f.key_bounds = bounds.data();
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.o, (std::array<float, 2>{0, 3}));
  call.f.sinks = &sink;
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.o, (std::array<float, 2>{0, 1.5f}));
  bw_attention_backward_params b = call.Backward();
  float d_sink = 9;
  b.d_sinks = &d_sink;
  EXPECT_EQ(bw_attention_backward(&b), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_FLOAT_EQ(d_sink, -0.5f * 1.5f);
  call.f.reserved2 = 1;
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_INVALID_ARGUMENT);
}

// As a header before 1.3 lays it out: a shorter `forward`, and no d_sinks.
TEST(KernelsCApiTest, AnOlderBackwardWithAShorterForwardServes) {
  AttentionCall call;
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_OK);
  bw_attention_backward_params today = call.Backward();
  EXPECT_EQ(bw_attention_backward(&today), BW_KERNEL_OK) << bw_kernels_last_error();
  const std::array<float, 2> expected = call.dv;
  call.dv = {};
  const size_t at = offsetof(bw_attention_backward_params, forward);
  const size_t size = offsetof(bw_attention_forward_params, v_dim);
  const size_t rest = offsetof(bw_attention_backward_params, d_sinks) - offsetof(bw_attention_backward_params, d_o);
  today.struct_size = static_cast<uint32_t>(at + size + rest);
  today.forward.struct_size = static_cast<uint32_t>(size);
  std::vector<unsigned char> older(today.struct_size);
  std::memcpy(older.data(), &today, at + size);
  std::memcpy(older.data() + at + size, &today.d_o, rest);
  auto* p = reinterpret_cast<bw_attention_backward_params*>(older.data());
  EXPECT_EQ(bw_attention_backward(p), BW_KERNEL_OK) << bw_kernels_last_error();
  EXPECT_EQ(call.dv, expected);
  p->forward.struct_size -= 8;
  EXPECT_EQ(bw_attention_backward(p), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("forward.struct_size is"));
  call.f.struct_size = static_cast<uint32_t>(size);
  EXPECT_EQ(bw_attention_forward(&call.f), BW_KERNEL_OK) << bw_kernels_last_error();
}

TEST(KernelsCApiTest, OtherCallsNameTheBadArgument) {
  std::array<float, 8> data{};
  std::array<float, 2> a{}, b{};
  bw_key_leak_params leak{};
  leak.struct_size = sizeof(leak);
  leak.batch = leak.kv_heads = 1;
  leak.k_len = leak.head_dim = 2;
  leak.d_k = {data.data(), 0, 0, 2};
  leak.leak_sum = a.data();
  EXPECT_EQ(bw_key_leak(&leak), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_STREQ(bw_kernels_last_error(), "gradient_sum is NULL, but must point to data");
  leak.gradient_sum = b.data();
  EXPECT_EQ(bw_key_leak(&leak), BW_KERNEL_OK);
  leak.kv_heads = 65537;
  EXPECT_EQ(bw_key_leak(&leak), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_STREQ(bw_kernels_last_error(), "kv_heads is 65537, but must be 1..65536");

  bw_center_keys_params center{};
  center.struct_size = sizeof(center);
  center.batch = center.kv_heads = 1;
  center.k_len = center.head_dim = 2;
  center.k = center.out = {data.data(), 0, 0, 2};
  EXPECT_EQ(bw_center_keys(&center), BW_KERNEL_OK) << bw_kernels_last_error();
  center.out.token_stride = 1;
  EXPECT_EQ(bw_center_keys(&center), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_STREQ(bw_kernels_last_error(),
               "out.token_stride is 1, but must be at least head_dim 2 in magnitude, or rows overlap");

  bw_spectral_params spectral{};
  spectral.struct_size = sizeof(spectral);
  spectral.heads = spectral.rows = 1;
  spectral.columns = 2;
  spectral.weight = data.data();
  spectral.column_stride = 1;
  spectral.sigma = a.data();
  spectral.overlap = b.data();
  EXPECT_EQ(bw_spectral_norms(&spectral), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("direction is NULL, but must be given"));
  spectral.overlap = nullptr;
  spectral.columns = 0;
  EXPECT_EQ(bw_spectral_norms(&spectral), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("columns is 0, but must be 1.."));
  spectral.rows = 0;
  EXPECT_EQ(bw_spectral_norms(&spectral), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("rows is 0, but must be 1..512"));

  bw_increment_rank_params rank{};
  rank.struct_size = sizeof(rank);
  rank.heads = 3;
  rank.kv_heads = 2;
  rank.rows = rank.columns = 1;
  EXPECT_EQ(bw_increment_rank(&rank), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), StartsWith("heads is 3, but must be a multiple of"));
  rank.kv_heads = 3;
  EXPECT_EQ(bw_increment_rank(&rank), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_STREQ(bw_kernels_last_error(), "wq is NULL, but must point to data");
}

// Callers of this major version give memory for so many statistics, and read them in this order.
static_assert(BW_KERNELS_API_VERSION_MAJOR != 1 || (BW_PROBE_STAT_COUNT == 15 && BW_PROBE_KV_STAT_COUNT == 2),
              "another number of statistics needs another major version");

TEST(KernelsCApiTest, TheLastErrorBelongsToItsThread) {
  EXPECT_EQ(bw_probe(nullptr), BW_KERNEL_INVALID_ARGUMENT);
  std::thread([] { EXPECT_STREQ(bw_kernels_last_error(), ""); }).join();
  EXPECT_STRNE(bw_kernels_last_error(), "");
}

TEST(KernelsCApiTest, TheCpuIsAvailableAndTheVersionIsTheHeaders) {
  EXPECT_EQ(bw_kernels_available(BW_CPU), 1);
  EXPECT_EQ(bw_kernels_available(2), 0);
  EXPECT_EQ(bw_kernels_available(0xffffffff), 0);
  EXPECT_EQ(bw_kernels_abi_version() >> 16, uint32_t{BW_KERNELS_API_VERSION_MAJOR});
  EXPECT_EQ(bw_kernels_abi_version() & 0xffff, uint32_t{BW_KERNELS_API_VERSION_MINOR});
}

TEST(KernelsCApiTest, AMissingBackendIsUnavailable) {
  if (bw_kernels_available(BW_CUDA)) GTEST_SKIP() << "there is one";
  ProbeCall call;
  call.p.backend = BW_CUDA;
  EXPECT_EQ(bw_probe(&call.p), BW_KERNEL_UNAVAILABLE);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("backend is 1 (CUDA)"));
  EXPECT_THAT(call.out, Each(kMark));
}

TEST(KernelsCApiTest, SampledRowsAreThoseOfTheHeader) {
  EXPECT_EQ(bw_probe_sampled_row(5, 1, 2, 3, 7, 100), bellwether::kernels::SampledRow(5, 1, 2, 3, 7, 100));
  EXPECT_EQ(bw_probe_sampled_row(5, 1, 2, 7, 7, 100), -1);
  EXPECT_EQ(bw_probe_sampled_row(5, 1, 2, 0, 0, 100), -1);
  EXPECT_EQ(bw_probe_sampled_row(5, 1, 2, 0, 101, 100), -1);
  EXPECT_EQ(bw_probe_sampled_row(5, 1, 2, 0, 1, uint64_t{1} << 31), -1);
}

}  // namespace
