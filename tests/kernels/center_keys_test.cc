// Goal: centring takes the mean of each sequence and nothing else, in place or
// not, for packed sequences of any length, and rounds once.
// Method: random keys against plain loops; exact means where rounding could
// hide; memory around the output is watched.

#include "bellwether/kernels/center_keys.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels {
namespace {

using testing::Operand;

void* Data(Operand& x) { return const_cast<void*>(x.View().data); }

Status Center(const Operand& k, Operand& out, const std::vector<int32_t>& cu_seqlens = {}, uint32_t threads = 0) {
  const CenterKeysParams p{.dtype = k.dtype,
                           .batch = k.batch,
                           .kv_heads = k.heads,
                           .k_len = k.tokens,
                           .head_dim = k.channels,
                           .k = k.View(),
                           .out = Data(out),
                           .out_batch_stride = out.batch_stride,
                           .out_head_stride = out.head_stride,
                           .out_token_stride = out.token_stride,
                           .cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
                           .sequences = static_cast<int64_t>(cu_seqlens.size()) - 1};
  return CenterKeys(p, {.threads = threads});
}

// k minus its mean over tokens [begin, end), rounded to k's type.
double Expected(const Operand& k, int64_t b, int64_t h, int64_t t, int64_t c, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t j = begin; j < end; ++j) sum += k.Get(b, h, j, c);
  Operand rounded(k.dtype, 1, 1, 1, 1);
  rounded.Set(0, 0, 0, 0, k.Get(b, h, t, c) - sum / static_cast<double>(end - begin));
  return rounded.Get(0, 0, 0, 0);
}

TEST(CenterKeysTest, EqualsPlainLoopsAndLeavesThePaddingAlone) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Operand k(dtype, 2, 3, 20, 9), out(dtype, 2, 3, 20, 9);
    std::mt19937 rng(1);
    k.FillNormal(rng, 5);
    for (uint32_t threads : {0u, 4u}) {
      ASSERT_EQ(Center(k, out, {}, threads), Status::kOk) << LastErrorMessage();
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 3; ++h) {
          for (int64_t t = 0; t < 20; ++t) {
            for (int64_t c = 0; c < 9; ++c) {
              EXPECT_EQ(out.Get(b, h, t, c), Expected(k, b, h, t, c, 0, 20));
            }
            EXPECT_TRUE(std::isnan(out.Get(b, h, t, 9))) << "padding was written";
          }
        }
      }
    }
  }
}

TEST(CenterKeysTest, TheMeanIsOfVisibleTokensAndOthersStay) {
  Operand k(DType::kFloat32, 2, 2, 20, 9), out(DType::kFloat32, 2, 2, 20, 9);
  std::mt19937 rng(1);
  k.FillNormal(rng, 5);
  std::vector<uint8_t> visible(40, 1);  // [batch][tokens], for all heads: 7 to 19 of the second entry are none.
  std::fill(visible.begin() + 27, visible.end(), 0);
  CenterKeysParams p{.batch = 2, .kv_heads = 2, .k_len = 20, .head_dim = 9, .k = k.View(), .out = Data(out)};
  p.out_batch_stride = out.batch_stride;
  p.out_head_stride = out.head_stride;
  p.out_token_stride = out.token_stride;
  p.visible = {.data = visible.data(), .batch_stride = 20, .key_stride = 1};
  ASSERT_EQ(CenterKeys(p, {}), Status::kOk) << LastErrorMessage();
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t t = 0; t < 20; ++t) {
      EXPECT_EQ(out.Get(0, h, t, 3), Expected(k, 0, h, t, 3, 0, 20));
      EXPECT_EQ(out.Get(1, h, t, 3), t < 7 ? Expected(k, 1, h, t, 3, 0, 7) : k.Get(1, h, t, 3));
    }
  }
}

TEST(CenterKeysTest, InPlaceEqualsOutOfPlace) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Operand k(dtype, 2, 2, 33, 16), out(dtype, 2, 2, 33, 16);
    std::mt19937 rng(2);
    k.FillNormal(rng, -3);
    ASSERT_EQ(Center(k, out), Status::kOk);
    ASSERT_EQ(Center(k, k), Status::kOk);
    for (int64_t t = 0; t < 33; ++t) EXPECT_EQ(k.Get(1, 1, t, 15), out.Get(1, 1, t, 15));
  }
}

TEST(CenterKeysTest, MeanIsZeroAndCenteringIsIdempotent) {
  Operand k(DType::kFloat32, 1, 1, 1000, 4), out(DType::kFloat32, 1, 1, 1000, 4);
  std::mt19937 rng(3);
  k.FillNormal(rng, 1000, 1);
  ASSERT_EQ(Center(k, out), Status::kOk);
  for (int64_t c = 0; c < 4; ++c) {
    double sum = 0;
    for (int64_t t = 0; t < 1000; ++t) sum += out.Get(0, 0, t, c);
    EXPECT_LE(std::fabs(sum / 1000), 2.4e-7) << "half an ulp of the largest difference";
  }
  Operand again(DType::kFloat32, 1, 1, 1000, 4);
  ASSERT_EQ(Center(out, again), Status::kOk);
  for (int64_t t = 0; t < 1000; ++t) {
    EXPECT_LE(std::fabs(again.Get(0, 0, t, 0) - out.Get(0, 0, t, 0)), 2e-7);
  }
}

TEST(CenterKeysTest, PackedSequencesKeepTheirOwnMeans) {
  const std::vector<int32_t> cu_seqlens = {0, 0, 1, 7, 7, 30, 30};  // Lengths 0 1 6 0 23 0.
  Operand k(DType::kBFloat16, 1, 2, 30, 5), out(DType::kBFloat16, 1, 2, 30, 5);
  std::mt19937 rng(4);
  k.FillNormal(rng, 2);
  k.Set(0, 0, 3, 2, NAN);
  ASSERT_EQ(Center(k, out, cu_seqlens, 3), Status::kOk) << LastErrorMessage();
  for (int64_t h = 0; h < 2; ++h) {
    for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
      for (int64_t t = cu_seqlens[s]; t < cu_seqlens[s + 1]; ++t) {
        for (int64_t c = 0; c < 5; ++c) {
          if (h == 0 && c == 2 && s == 2) {
            EXPECT_TRUE(std::isnan(out.Get(h * 0, h, t, c)));
          } else {
            EXPECT_EQ(out.Get(0, h, t, c), Expected(k, 0, h, t, c, cu_seqlens[s], cu_seqlens[s + 1]));
          }
        }
      }
    }
    for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(out.Get(0, h, 0, c), 0) << "one token";
  }
}

TEST(CenterKeysTest, RoundsTheDifferenceOnce) {
  // Mean 1/3 of keys 1, 0, 0 in bf16: neighbours decide; float32 would do the same
  // through one rounding only if nothing lies on a tie.
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Operand k(dtype, 1, 1, 4, 1), out(dtype, 1, 1, 4, 1);
    // Difference 1 + half an ulp + 2^-26 after the mean: up, not to even.
    const double ulp = dtype == DType::kBFloat16 ? std::ldexp(1.0, -7) : std::ldexp(1.0, -10);
    k.Set(0, 0, 0, 0, 1 + ulp);
    k.Set(0, 0, 1, 0, ulp);
    k.Set(0, 0, 2, 0, ulp);
    k.Set(0, 0, 3, 0, -1);
    ASSERT_EQ(Center(k, out), Status::kOk);
    for (int64_t t = 0; t < 4; ++t) EXPECT_EQ(out.Get(0, 0, t, 0), Expected(k, 0, 0, t, 0, 0, 4));
  }
}

TEST(CenterKeysTest, BadSequenceOffsetsAreNamed) {
  Operand k(DType::kFloat32, 1, 1, 4, 2), out(DType::kFloat32, 1, 1, 4, 2);
  k.Fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
  const auto rejects = [&](const std::vector<int32_t>& cu_seqlens, const std::string& sentence) {
    EXPECT_EQ(Center(k, out, cu_seqlens), Status::kInvalidArgument);
    EXPECT_THAT(LastErrorMessage(), ::testing::HasSubstr(sentence));
    EXPECT_TRUE(std::isnan(out.Get(0, 0, 0, 0))) << "a rejected call must not write";
  };
  rejects({1, 4}, "cu_seqlens[0] is 1, but must be 0..0");
  rejects({0, 3, 2, 4}, "cu_seqlens[2] is 2, but must be 3..4");
  rejects({0, 3}, "cu_seqlens[1] is 3, but must be 4..4");
  rejects({0, 5}, "cu_seqlens[1] is 5, but must be 4..4");
  rejects({0}, "sequences is 0, but must be 1..");
  k.batch = 2;
  rejects({0, 4}, "batch (with cu_seqlens) is 2, but must be 1..1");
}

}  // namespace
}  // namespace bellwether::kernels
