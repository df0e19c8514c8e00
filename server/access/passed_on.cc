#include "server/access/passed_on.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <array>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace bellwether::server {
namespace {

constexpr char kVersion[] = "1";
constexpr size_t kFields = 7;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

std::string Mac(std::string_view key, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> mac{};
  unsigned size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), mac.data(), &size);
  return {reinterpret_cast<const char*>(mac.data()), size};
}

// False: not kFields fields and nothing else.
bool Split(std::string_view text, std::vector<std::string>* fields) {
  while (!text.empty()) {
    const size_t colon = text.find(':');
    size_t bytes = 0;
    if (colon == std::string_view::npos || !absl::SimpleAtoi(View(text.substr(0, colon)), &bytes)) return false;
    text.remove_prefix(colon + 1);
    if (bytes > text.size() || fields->size() == kFields) return false;
    fields->emplace_back(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return fields->size() == kFields;
}

}  // namespace

std::string SealPassedOn(const PassedOn& passed_on, std::string_view method, std::string_view key,
                         int64_t now_unix_ms) {
  std::string text;
  for (const std::string& field :
       {std::string(kVersion), absl::StrCat(now_unix_ms), std::string(method),
        absl::StrCat(static_cast<int>(passed_on.who)), passed_on.name, passed_on.own_run, passed_on.from}) {
    absl::StrAppend(&text, field.size(), ":", field);
  }
  return absl::StrCat(absl::WebSafeBase64Escape(text), ".", absl::WebSafeBase64Escape(Mac(key, text)));
}

absl::StatusOr<PassedOn> OpenPassedOn(std::string_view seal, std::string_view method, std::string_view key,
                                      int64_t now_unix_ms) {
  const absl::Status wrong = absl::UnauthenticatedError("what another server is said to pass on was not sealed by one");
  const size_t dot = seal.find('.');
  std::string text, mac;
  if (key.empty() || seal.size() > kPassedOnBytesMax || dot == std::string_view::npos ||
      !absl::WebSafeBase64Unescape(View(seal.substr(0, dot)), &text) ||
      !absl::WebSafeBase64Unescape(View(seal.substr(dot + 1)), &mac)) {
    return wrong;
  }
  const std::string right = Mac(key, text);
  if (mac.size() != right.size() || CRYPTO_memcmp(mac.data(), right.data(), right.size()) != 0) return wrong;
  std::vector<std::string> fields;
  int64_t sealed_unix_ms = 0;
  int who = 0;
  if (!Split(text, &fields) || fields[0] != kVersion || !absl::SimpleAtoi(fields[1], &sealed_unix_ms) ||
      !absl::SimpleAtoi(fields[3], &who) || who < static_cast<int>(PassedOn::Who::kServer) ||
      who > static_cast<int>(PassedOn::Who::kNamed)) {
    return absl::UnauthenticatedError("another server passes on what this version does not know");
  }
  if (fields[2] != method) return absl::UnauthenticatedError("another server passed on another call than this");
  if (sealed_unix_ms > now_unix_ms + kPassedOnMsMax || sealed_unix_ms < now_unix_ms - kPassedOnMsMax) {
    return absl::UnauthenticatedError("what another server passed on is too old, or not yet");
  }
  return PassedOn{static_cast<PassedOn::Who>(who), fields[4], fields[5], fields[6]};
}

}  // namespace bellwether::server
