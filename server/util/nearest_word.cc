#include "server/util/nearest_word.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace bellwether::server {
namespace {

// How many letters must be added, left out or changed to make one of the other.
size_t LettersBetween(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string NearestWord(std::string_view typed, std::span<const std::string> words) {
  constexpr size_t kLong = 8;
  constexpr size_t kTypedMax = 256;  // A longer one is no slip of the pen.
  if (typed.size() > kTypedMax) return "";
  size_t fewest = typed.size() >= kLong ? 3 : 2;
  std::string nearest;
  for (const std::string& word : words) {
    const size_t letters = LettersBetween(typed, word);
    if (letters >= fewest) continue;
    fewest = letters;
    nearest = word;
  }
  return nearest;
}

}  // namespace bellwether::server
