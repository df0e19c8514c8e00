// A row at a time, as numbers in double.  Sums over the rows are made by columns, so that each
// result comes from one thread in one order.

#include "bellwether/kernels/law_modules.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "error.h"
#include "law_modules_parts.h"
#include "law_sums_parts.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kRowsTogether = 64;
constexpr int64_t kColumnsTogether = 64;
constexpr int64_t kLogitLanes = 16;  // Independent chains.
constexpr int64_t kLogitsTogether = 4096;

inline double UlpAt(float x, UlpOf of) {
  const auto exponent = static_cast<int32_t>((std::bit_cast<uint32_t>(x) >> 23) & 0xff);
  return std::bit_cast<double>(static_cast<uint64_t>(std::max(exponent, of.least) + of.shift) << 52);
}

// Elements `from` to `from` + `count` of a row are added to values, the squares of their distances
// to ulp2, and what those next to 0 may have lost to lost, if these are wanted.
void AddRow(const LawMatrix& matrix, int64_t row, int64_t from, int64_t count, double* values, double* ulp2,
            double* lost = nullptr) {
  const UlpOf of = UlpOfType(matrix.dtype);
  const double few = kFewDistances * UlpAt(0, of);
  WithElement(matrix.dtype, [&]<typename Element>(const Element*) {
    const Element* const x = static_cast<const Element*>(matrix.data) + row * matrix.row_stride + from;
    for (int64_t j = 0; j < count; ++j) {
      const float value = ToFloat(x[j]);
      const double ulp = UlpAt(value, of);
      values[j] += static_cast<double>(value);
      if (ulp2 != nullptr) ulp2[j] += ulp * ulp;
      if (lost != nullptr && std::fabs(static_cast<double>(value)) <= few) lost[j] += ulp / 2;
    }
  });
}

void AddParts(const LawParts& gradient, int64_t row, int64_t from, int64_t count, double* values, double* ulp2,
              double* lost = nullptr) {
  for (int64_t part = 0; part < gradient.count; ++part) {
    AddRow(gradient.parts[part], row, from, count, values, ulp2, lost);
  }
}

struct RowBuffer {
  explicit RowBuffer(int64_t width) : all(static_cast<size_t>(8 * width)), n(width) {}
  double* At(int64_t which) { return all.data() + which * n; }
  double* x() { return At(0); }
  double* y() { return At(1); }
  double* y_ulp2() { return At(2); }
  double* d_x() { return At(3); }
  double* d_x_ulp2() { return At(4); }
  double* d_y() { return At(5); }
  double* d_y_ulp2() { return At(6); }
  double* d_x_lost() { return At(7); }
  std::vector<double> all;
  int64_t n;
};

void OfRow(const LawNormsParams& p, int64_t i, RowBuffer& b, double* rest) {
  std::fill(b.all.begin(), b.all.end(), 0.0);
  AddRow(p.x, i, 0, p.n, b.x(), nullptr);
  AddRow(p.y, i, 0, p.n, b.y(), b.y_ulp2());
  AddParts(p.d_x, i, 0, p.n, b.d_x(), b.d_x_ulp2(), b.d_x_lost());
  AddParts(p.d_y, i, 0, p.n, b.d_y(), b.d_y_ulp2());
  double mean = 0;
  if (p.centred) {
    for (int64_t j = 0; j < p.n; ++j) mean += b.x()[j];
    mean /= static_cast<double>(p.n);
  }
  NormRow row;
  for (int64_t j = 0; j < p.n; ++j) {
    const double c = b.x()[j] - mean, w = b.y()[j] - p.shift[j], d_x = b.d_x()[j], d_y = b.d_y()[j];
    const double gained = p.gain[j] * d_y;
    row.squares += c * c;
    row.sizes += std::fabs(c);
    row.c_d_x += c * d_x;
    row.w_d_y += w * d_y;
    row.d_x += d_x;
    row.d_x_ulp2 += b.d_x_ulp2()[j];
    row.lost += b.d_x_lost()[j];
    row.c_lost += std::fabs(c) * b.d_x_lost()[j];
    row.variance += c * c * b.d_x_ulp2()[j];
    row.inside += d_y * d_y * b.y_ulp2()[j] + w * w * b.d_y_ulp2()[j];
    row.gained += gained * gained;
  }
  StoreNormRow(
      p, row, mean, [](double x) { return std::sqrt(x); }, p.rows, p.row_stats + i);
  const double r = std::sqrt(row.squares / static_cast<double>(p.n) + p.eps);
  for (int64_t j = 0; j < p.n; ++j) {
    const double y = b.y()[j], left = y - ((b.x()[j] - mean) / r * p.gain[j] + p.shift[j]);
    rest[0] += left * left;
    rest[1] += y * y;
  }
}

float RoundedTo(DType dtype, double x) {
  const auto value = static_cast<float>(x);
  if (dtype == DType::kBFloat16) return ToFloat(ToBFloat16(value));
  return dtype == DType::kFloat16 ? ToFloat(ToFloat16(value)) : value;
}

void OfColumns(const LawNormsParams& p, int64_t from, int64_t count) {
  double sums[kLawNormFeatureCount][kColumnsTogether] = {};
  const UlpOf of = UlpOfType(p.y.dtype);
  for (int64_t i = 0; i < p.rows; ++i) {
    double y[kColumnsTogether] = {}, y_ulp2[kColumnsTogether] = {}, d_y[kColumnsTogether] = {};
    AddRow(p.y, i, from, count, y, y_ulp2);
    AddParts(p.d_y, i, from, count, d_y, nullptr);
    const double off = p.row_stats[kLawNormOff * p.rows + i];
    for (int64_t j = 0; j < count; ++j) {
      const double product = (y[j] - p.shift[from + j]) * d_y[j], size = std::fabs(d_y[j]);
      // A product may be rounded before it is added up.
      const double ulp = UlpAt(RoundedTo(p.y.dtype, product), of);
      sums[kLawNormSum][j] += product;
      sums[kLawNormVariance][j] += d_y[j] * d_y[j] * y_ulp2[j] + ulp * ulp;
      sums[kLawNormAlike][j] +=
          (size * std::sqrt(y_ulp2[j]) + ulp) / 2 + kLawNormInside * 2 * off * std::fabs(p.gain[from + j]) * size;
      sums[kLawNormAbsSum][j] += std::fabs(product);
    }
  }
  for (int stat = 0; stat < kLawNormFeatureCount; ++stat) {
    for (int64_t j = 0; j < count; ++j) {
      p.feature_stats[stat * p.n + from + j] += stat == kLawNormVariance ? sums[stat][j] / 12 : sums[stat][j];
    }
  }
}

// e^x for kFarBelow <= x <= 0; written so that compilers make vectors of it.
inline float Exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 2^23: adding it rounds to integers.
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float e = 1.9875691500e-4f;
  e = e * r + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = e * r * r + r + 1.0f;
  const uint32_t power = std::bit_cast<uint32_t>(shifted) << 23;  // n, in the exponent.
  return e * std::bit_cast<float>(power + 0x3f800000u);
}

// Comparisons are of integers below: those of floats may trap, so compilers make no vectors of them.

// Rises as the number does.
inline int32_t OrderOf(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline int32_t MagnitudeOf(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }

struct LogitSums {
  float others[kLogitLanes] = {}, sizes[kLogitLanes] = {};
  int32_t equal[kLogitLanes] = {};

  void Add(const float* values, float top) {
    constexpr auto kFar = std::bit_cast<int32_t>(-kFarBelow);
    const auto of_top = std::bit_cast<uint32_t>(top);
    for (int64_t lane = 0; lane < kLogitLanes; ++lane) {
      const float below = -std::bit_cast<float>(std::min(MagnitudeOf(values[lane] - top), kFar));
      const auto is_top = static_cast<uint32_t>(std::bit_cast<uint32_t>(values[lane]) == of_top);
      const float e = std::bit_cast<float>(std::bit_cast<uint32_t>(Exponential(below)) & (is_top - 1));
      others[lane] += e;
      sizes[lane] += e * below;
      equal[lane] += static_cast<int32_t>(is_top);
    }
  }
};

template <typename Element>
void OfLogits(const LawLogitsParams& p, int64_t i) {
  const Element* const z = static_cast<const Element*>(p.z.data) + i * p.z.row_stride;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const int64_t whole = p.classes / kLogitLanes * kLogitLanes;
  float rest[kLogitLanes];  // The last ones, and what counts for nothing.
  std::fill(rest, rest + kLogitLanes, kNothing);
  for (int64_t j = whole; j < p.classes; ++j) rest[j - whole] = ToFloat(z[j]);
  int32_t tops[kLogitLanes], largest[kLogitLanes];
  for (int64_t lane = 0; lane < kLogitLanes; ++lane) {
    tops[lane] = OrderOf(rest[lane]);
    largest[lane] = MagnitudeOf(rest[lane]);
  }
  for (int64_t j = 0; j < whole; j += kLogitLanes) {
    for (int64_t lane = 0; lane < kLogitLanes; ++lane) {
      const float value = ToFloat(z[j + lane]);
      tops[lane] = std::max(tops[lane], OrderOf(value));
      largest[lane] = std::max(largest[lane], MagnitudeOf(value));
    }
  }
  const bool has_nan = *std::max_element(largest, largest + kLogitLanes) > 0x7f800000;
  const int32_t order = *std::max_element(tops, tops + kLogitLanes);
  const float top = std::bit_cast<float>(order ^ ((order >> 31) & 0x7fffffff));
  // In float, and some thousand elements at a time in double.
  double sum = 0, size = 0;
  int64_t of_top = 0;
  const auto take = [&](const LogitSums& sums) {
    for (int64_t lane = 0; lane < kLogitLanes; ++lane) {
      sum += static_cast<double>(sums.others[lane]);
      size += static_cast<double>(sums.sizes[lane]);
      of_top += sums.equal[lane];
    }
  };
  for (int64_t begin = 0; begin < whole; begin += kLogitsTogether) {
    LogitSums sums;
    const int64_t end = std::min(whole, begin + kLogitsTogether);
    for (int64_t j = begin; j < end; j += kLogitLanes) {
      float values[kLogitLanes];
      for (int64_t lane = 0; lane < kLogitLanes; ++lane) values[lane] = ToFloat(z[j + lane]);
      sums.Add(values, top);
    }
    take(sums);
  }
  if (whole < p.classes) {
    LogitSums sums;
    sums.Add(rest, top);
    for (int64_t lane = p.classes - whole; lane < kLogitLanes; ++lane) {
      sums.others[lane] = sums.sizes[lane] = 0;
      sums.equal[lane] = 0;
    }
    take(sums);
  }
  const double total = has_nan ? std::numeric_limits<double>::quiet_NaN() : sum + static_cast<double>(of_top - 1);
  p.out[kLawLogitUnsure * p.rows + i] = total / (1 + total);
  p.out[kLawLogitRoundings * p.rows + i] = 1 + 2 * std::log1p(total) - size / (1 + total);
}

uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }
uint32_t BitsOf(BFloat16 x) { return x.bits; }
uint32_t BitsOf(Float16 x) { return x.bits; }

template <typename Element>
void OfGroup(const LawEqualRowsParams& p, int64_t group, std::vector<uint64_t>& keys, std::vector<uint32_t>& counts) {
  const int64_t slots = LawEqualRowsSlots(p.rows);
  keys.assign(static_cast<size_t>(slots), 0);
  counts.assign(static_cast<size_t>(slots), 0);
  double there = 0, alike = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    const Element* const row = static_cast<const Element*>(p.data) + i * p.row_stride;
    uint32_t bits[kEqualColumns];
    bool zero = true;
    for (int64_t k = 0; k < kEqualColumns; ++k) {
      const int64_t column = (group * kEqualColumns + k) * p.width / (kEqualGroups * kEqualColumns);
      const Element x = row[column * p.column_stride];
      bits[k] = BitsOf(x);
      zero = zero && ToFloat(x) == 0;
    }
    if (zero) continue;
    const uint64_t key = KeyOf(bits, sizeof(Element) == 2);
    auto slot = static_cast<size_t>(MixedKey(key)) & static_cast<size_t>(slots - 1);
    while (keys[slot] != 0 && keys[slot] != key) slot = (slot + 1) & static_cast<size_t>(slots - 1);
    keys[slot] = key;
    // m rows that are alike add 1, 3, 5, ..: m^2 together.
    alike += 2.0 * counts[slot]++ + 1;
    there += 1;
  }
  p.out[group * kLawEqualStatCount + kLawEqualThere] += there;
  p.out[group * kLawEqualStatCount + kLawEqualAlike] += alike;
}

Status NoMemory(const char* what) { return Fail(Status::kDeviceError, "out of memory for the %s", what); }

}  // namespace

Status LawNorms(const LawNormsParams& p, uint32_t threads) {
  const int64_t units = (p.rows + kRowsTogether - 1) / kRowsTogether;
  const double elements = 8 * static_cast<double>(p.rows) * static_cast<double>(p.n);
  std::vector<double> rest;
  std::vector<RowBuffer> buffers;  // Of the units that run at once there are no more than these.
  try {
    rest.assign(static_cast<size_t>(2 * units), 0.0);
    buffers.assign(static_cast<size_t>(std::min<int64_t>(units, std::max<uint32_t>(1, threads))), RowBuffer(p.n));
  } catch (const std::bad_alloc&) {
    return NoMemory("rows of a norm");
  }
  const auto together = static_cast<int64_t>(buffers.size());
  // A thread has every so many units, and a buffer of its own.
  ParallelFor(together, UsefulThreads(threads, together, elements), [&](int64_t thread) {
    for (int64_t unit = thread; unit < units; unit += together) {
      const int64_t end = std::min(p.rows, (unit + 1) * kRowsTogether);
      for (int64_t i = unit * kRowsTogether; i < end; ++i) {
        OfRow(p, i, buffers[static_cast<size_t>(thread)], &rest[static_cast<size_t>(2 * unit)]);
      }
    }
  });
  for (size_t unit = 0; unit < static_cast<size_t>(units); ++unit) {
    p.rest[0] += rest[2 * unit];
    p.rest[1] += rest[2 * unit + 1];
  }
  const int64_t columns = (p.n + kColumnsTogether - 1) / kColumnsTogether;
  ParallelFor(columns, UsefulThreads(threads, columns, elements), [&](int64_t unit) {
    const int64_t from = unit * kColumnsTogether;
    OfColumns(p, from, std::min(kColumnsTogether, p.n - from));
  });
  return Status::kOk;
}

Status LawLogits(const LawLogitsParams& p, uint32_t threads) {
  const double elements = 4 * static_cast<double>(p.rows) * static_cast<double>(p.classes);
  ParallelFor(p.rows, UsefulThreads(threads, p.rows, elements), [&](int64_t i) {
    WithElement(p.z.dtype, [&]<typename Element>(const Element*) { OfLogits<Element>(p, i); });
  });
  return Status::kOk;
}

Status LawEqualRows(const LawEqualRowsParams& p, uint32_t) {
  try {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> counts;
    const auto slots = static_cast<size_t>(LawEqualRowsSlots(p.rows));
    keys.reserve(slots);
    counts.reserve(slots);
    for (int64_t group = 0; group < kEqualGroups; ++group) {
      WithElement(p.dtype, [&]<typename Element>(const Element*) { OfGroup<Element>(p, group, keys, counts); });
    }
  } catch (const std::bad_alloc&) {
    return NoMemory("rows that are equal");
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
