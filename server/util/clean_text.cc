#include "server/util/clean_text.h"

#include <algorithm>

namespace bellwether::server {

size_t Utf8Length(std::string_view text) {
  if (text.empty()) return 0;
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0x80                    ? 1
                        : first >= 0xc2 && first < 0xe0 ? 2
                        : first >= 0xe0 && first < 0xf0 ? 3
                        : first >= 0xf0 && first < 0xf5 ? 4
                                                        : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond the last code point.
  if (length == 3 && ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f))) return 0;
  if (length == 4 && ((first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f))) return 0;
  return length;
}

bool IsControl(std::string_view character) {
  const auto byte = [character](size_t i) { return static_cast<unsigned char>(character[i]); };
  switch (character.size()) {
    case 1:
      return byte(0) < 0x20 || byte(0) == 0x7f;
    case 2:
      return byte(0) == 0xc2 && byte(1) < 0xa0;  // U+0080 to U+009F.
    case 3:                                      // U+2028 to U+202E, U+2066 to U+2069.
      return byte(0) == 0xe2 && ((byte(1) == 0x80 && byte(2) >= 0xa8 && byte(2) <= 0xae) ||
                                 (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9));
    default:
      return false;
  }
}

std::string CleanText(std::string_view text, size_t bytes_max) {
  std::string clean;
  clean.reserve(std::min(text.size(), bytes_max));
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    const std::string_view character = text.substr(0, std::max<size_t>(length, 1));
    const std::string_view shown = length == 0 ? "?" : IsControl(character) ? " " : character;
    if (clean.size() + shown.size() > bytes_max) break;
    clean += shown;
    text.remove_prefix(character.size());
  }
  return clean;
}

}  // namespace bellwether::server
