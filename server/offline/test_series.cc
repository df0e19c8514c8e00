#include "server/offline/test_series.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/model/step_sample.h"

namespace bellwether::server {
namespace {

// Takes a number off the front of `text`.
bool TakeNumber(std::string_view* text, double* value) {
  const bool plus = text->starts_with('+');
  const std::string_view digits = text->substr(plus ? 1 : 0);
  if (digits.starts_with("NaN") || digits.starts_with("Inf") || digits.starts_with("-Inf")) {
    const size_t length = digits.starts_with("-Inf") ? 4 : 3;
    *value = digits.starts_with("NaN")
                 ? std::numeric_limits<double>::quiet_NaN()
                 : std::copysign(std::numeric_limits<double>::infinity(), length == 4 ? -1.0 : 1.0);
    *text = digits.substr(length);
    return true;
  }
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *value);
  if (error != std::errc()) return false;
  *text = digits.substr(static_cast<size_t>(end - digits.data()));
  return true;
}

// "x3" at the end of a word: how often it goes on.
bool TakeCount(std::string_view text, size_t* count) {
  if (!text.starts_with('x')) return false;
  text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *count);
  return error == std::errc() && end == text.data() + text.size() && *count <= kTestValuesMax;
}

bool ExpandWord(std::string_view word, std::vector<float>* values) {
  size_t count = 0;
  if (word.starts_with('_')) {
    if (word.size() > 1 && !TakeCount(word.substr(1), &count)) return false;
    values->insert(values->end(), word.size() > 1 ? count : 1, NotMeasured());
    return true;
  }
  double value = 0;
  if (!TakeNumber(&word, &value)) return false;
  double by = 0;
  char operation = '+';
  if (!word.empty() && word[0] != 'x') {
    operation = word[0];
    word.remove_prefix(1);
    if ((operation != '+' && operation != '-' && operation != '*') || !TakeNumber(&word, &by) || word.empty())
      return false;
  }
  if (!word.empty() && !TakeCount(word, &count)) return false;
  for (size_t i = 0; i <= count; ++i) {
    const auto n = static_cast<double>(i);
    const double at = operation == '*' ? value * std::pow(by, n) : value + (operation == '-' ? -by : by) * n;
    values->push_back(static_cast<float>(at));
  }
  return true;
}

}  // namespace

absl::StatusOr<std::vector<float>> ExpandValues(std::string_view notation) {
  std::vector<float> values;
  for (const absl::string_view word :
       absl::StrSplit(absl::string_view(notation.data(), notation.size()), ' ', absl::SkipEmpty())) {
    if (!ExpandWord({word.data(), word.size()}, &values)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", word, "\" is no value: must be like 1, 1x9, 1+0.5x9, 1-0.5x9, 1*2x9, _, _x9, NaN, +Inf, -Inf"));
    }
    if (values.size() > kTestValuesMax) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kTestValuesMax, " values"));
    }
  }
  if (values.empty()) return absl::InvalidArgumentError("no values");
  return values;
}

double TestFormula::At(int64_t step) const {
  if (kind == Kind::kConstant || step <= begin) return from;
  const auto passed = static_cast<double>(step - begin);
  if (kind == Kind::kExponential) return from * std::exp2(passed / doubling_steps);
  return step >= end ? to : from + (to - from) * passed / static_cast<double>(end - begin);
}

double TestNoise::On(double value) {
  // Box and Muller: the standard's own normal distribution is another one in
  // each library.
  const auto uniform = [this] { return (static_cast<double>(random_() >> 11) + 0.5) * 0x1p-53; };
  const double radius = std::sqrt(-2 * std::log(uniform()));
  const double noise = deviation_ * radius * std::cos(2 * std::numbers::pi * uniform());
  return by_factors_ ? value * std::exp(noise) : value + noise;
}

}  // namespace bellwether::server
