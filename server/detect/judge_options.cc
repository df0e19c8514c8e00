#include "server/detect/judge_options.h"

#include <array>
#include <cstddef>

namespace bellwether::server {
namespace {

// By BuiltIn.
constexpr std::array<const char*, kBuiltIns> kNames = {
    "drift.growth", "drift.level",  "drift.common_mode",
    "drift.leak",   "ties",         "norm",
    "logits",       "loss",         "gradient",
    "nonfinite",    "disagreement", "silent",
    "overhead"};
static_assert(static_cast<int>(BuiltIn::kOverhead) + 1 == kBuiltIns);

}  // namespace

const char* NameOf(BuiltIn test) { return kNames[static_cast<size_t>(test)]; }

std::optional<BuiltIn> BuiltInNamed(std::string_view name) {
  for (int i = 0; i < kBuiltIns; ++i) {
    const auto test = static_cast<BuiltIn>(i);
    if (name == NameOf(test)) return test;
  }
  return std::nullopt;
}

std::string BuiltInNames() {
  std::string all;
  for (const char* name : kNames) {
    if (!all.empty()) all += ", ";
    all += name;
  }
  return all;
}

}  // namespace bellwether::server
