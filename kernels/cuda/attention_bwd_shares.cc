#include "cuda/attention_bwd_shares.h"

#include <algorithm>

#include "cuda/attention_convert.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kMultiprocessors = 132;
constexpr int kSharesMax = 32;
constexpr int64_t kUnitsMax = 4096;  // shares of all tiles: their sums take up to 256 KB each
constexpr int kStepRows = 64;        // here, for all head dims
constexpr int kStepsMin = 16;        // of the longest share
// Measured, at 64 channels and at more.  The time of steps that a CTA takes beside its own.
constexpr double kStart[] = {6, 3};
// Under a causal mask the CTAs of a kv head are at unlike queries: by so much of its time a CTA is
// slower for each query head above two, which do not stay in L2.
constexpr double kPerHead[] = {0.01, 0.03};
// Shares that do not divide the heads: each takes all of them in turn.  Only as many as fit a section
// (kBwdSectionPairsMin), or it has heads of one kv head more.
constexpr double kUneven = 1.03;
constexpr double kGain = 0.97;  // at least: of the time without sharing

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The tiles of a call, in steps; of packed sequences as if all were as long as the mean.
struct Tiles {
  int64_t count, heads;
  double longest, mean, start, per_head;
  int at_once;

  explicit Tiles(const AttentionForwardParams& a) {
    const int64_t sequences = std::max<int64_t>(IsPacked(a) ? a.sequences : a.batch, 1);
    const int64_t packed = IsPacked(a) ? sequences : 1;
    const int64_t queries = CeilDivide(a.q_len, packed), keys = CeilDivide(a.k_len, packed);
    count = sequences * a.kv_heads * CeilDivide(keys, kBwdTileKeys);
    at_once = WidestDim(a) <= 128 || HasNarrowValues(a) ? kMultiprocessors : kMultiprocessors / 2;
    heads = a.heads / a.kv_heads;
    int64_t seen = queries;  // by the queries of the tile that most see
    if (a.causal) seen = std::min(seen, keys);
    if (a.window > 0) seen = std::min(seen, int64_t{a.window} + kBwdTileKeys);
    longest = static_cast<double>(heads * CeilDivide(seen, kStepRows));
    // Under the diagonal every tile is as long as it lies far from the end.
    const bool triangle = a.causal && seen == std::min(queries, keys);
    mean = triangle ? longest * (1 - 0.5 * static_cast<double>(seen) / static_cast<double>(keys)) : longest;
    start = kStart[WidestDim(a) > 64];
    per_head = triangle ? kPerHead[WidestDim(a) > 64] : 0;
  }

  bool IsEven(int shares) const { return heads % shares == 0 || shares % heads == 0; }

  // Of the call, with this many shares of each tile.
  double Time(int shares) const {
    const double longest_share = longest / shares + start;
    if (mean == longest) return static_cast<double>(CeilDivide(count * shares, at_once)) * longest_share;
    const double all = (mean + start * shares) * static_cast<double>(count) / at_once;
    const double share_heads = static_cast<double>(heads) / shares;
    return std::max(longest_share, all) * (1 + per_head * std::max(share_heads - 2, 0.)) *
           (IsEven(shares) ? 1 : kUneven);
  }
};

}  // namespace

int BackwardShares(const AttentionForwardParams& a) {
  if (a.q_len < 1 || a.k_len < 1) return 1;
  const Tiles tiles(a);
  int best = 1;
  double least = kGain * tiles.Time(1);
  for (int shares = 2; shares <= kSharesMax; ++shares) {
    if (tiles.longest < shares * kStepsMin || tiles.count * shares > kUnitsMax) break;
    if (!tiles.IsEven(shares) && kBwdSectionPairsMin % shares != 0) continue;
    const double time = tiles.Time(shares);
    if (time >= least) continue;
    best = shares;
    least = time;
  }
  return best;
}

}  // namespace bellwether::kernels::cuda
