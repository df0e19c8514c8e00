#include "server/query/json_text.h"

#include <google/protobuf/descriptor.h>

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Text bytes for each of the wire's, at the most usual: room that is not used costs nothing.
constexpr size_t kTextPerByte = 5;

void WriteText(const std::string& text, std::string* out) {
  *out += nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <typename Number>
void WriteNumber(Number value, std::string* out) {
  if (!std::isfinite(value)) {
    *out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
    return;
  }
  if (value == 0 && std::signbit(value)) {
    *out += "-0.0";  // "-0" is read as an integer, which has no such value.
    return;
  }
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  out->append(digits, end);
}

void WriteMessage(const Message& message, std::string* out);

// Of a list the one at `index`; -1: the field's own.
class FieldWriter {
 public:
  FieldWriter(const Message& message, const FieldDescriptor* field, int index, std::string* out)
      : message_(message), reflection_(*message.GetReflection()), field_(field), index_(index), out_(out) {}

  void Write() {
    switch (field_->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        absl::StrAppend(out_, Get(&Reflection::GetInt32, &Reflection::GetRepeatedInt32));
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        absl::StrAppend(out_, Get(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        absl::StrAppend(out_, "\"", Get(&Reflection::GetInt64, &Reflection::GetRepeatedInt64), "\"");
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        absl::StrAppend(out_, "\"", Get(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64), "\"");
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        WriteNumber(Get(&Reflection::GetDouble, &Reflection::GetRepeatedDouble), out_);
        break;
      case FieldDescriptor::CPPTYPE_FLOAT:
        WriteNumber(Get(&Reflection::GetFloat, &Reflection::GetRepeatedFloat), out_);
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        *out_ += Get(&Reflection::GetBool, &Reflection::GetRepeatedBool) ? "true" : "false";
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        WriteEnum(Get(&Reflection::GetEnumValue, &Reflection::GetRepeatedEnumValue));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        WriteString(Get(&Reflection::GetString, &Reflection::GetRepeatedString));
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        WriteMessage(index_ < 0 ? reflection_.GetMessage(message_, field_)
                                : reflection_.GetRepeatedMessage(message_, field_, index_),
                     out_);
        break;
    }
  }

 private:
  template <typename Value>
  Value Get(Value (Reflection::*own)(const Message&, const FieldDescriptor*) const,
            Value (Reflection::*of_list)(const Message&, const FieldDescriptor*, int) const) const {
    return index_ < 0 ? (reflection_.*own)(message_, field_) : (reflection_.*of_list)(message_, field_, index_);
  }
  void WriteEnum(int number) {
    const auto* const value = field_->enum_type()->FindValueByNumber(number);
    if (value == nullptr) return absl::StrAppend(out_, number);  // Of a newer version.
    absl::StrAppend(out_, "\"", std::string(value->name()), "\"");
  }
  void WriteString(const std::string& text) {
    if (field_->type() == FieldDescriptor::TYPE_STRING) return WriteText(text, out_);
    absl::StrAppend(out_, "\"", absl::Base64Escape(text), "\"");
  }

  const Message& message_;
  const Reflection& reflection_;
  const FieldDescriptor* const field_;
  const int index_;
  std::string* const out_;
};

// Keys of ours are text.
void WriteMap(const Message& message, const FieldDescriptor* field, std::string* out) {
  const Reflection& reflection = *message.GetReflection();
  *out += '{';
  for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
    const Message& entry = reflection.GetRepeatedMessage(message, field, i);
    if (i > 0) *out += ',';
    FieldWriter(entry, field->message_type()->map_key(), -1, out).Write();
    *out += ':';
    FieldWriter(entry, field->message_type()->map_value(), -1, out).Write();
  }
  *out += '}';
}

void WriteMessage(const Message& message, std::string* out) {
  const Reflection& reflection = *message.GetReflection();
  bool any = false;
  *out += '{';
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    if (!field->is_repeated() && field->has_presence() && !reflection.HasField(message, field)) continue;
    absl::StrAppend(out, any ? "," : "", "\"", std::string(field->name()), "\":");
    any = true;
    if (field->is_map()) {
      WriteMap(message, field, out);
    } else if (field->is_repeated()) {
      *out += '[';
      for (int at = 0; at < reflection.FieldSize(message, field); ++at) {
        if (at > 0) *out += ',';
        FieldWriter(message, field, at, out).Write();
      }
      *out += ']';
    } else {
      FieldWriter(message, field, -1, out).Write();
    }
  }
  *out += '}';
}

}  // namespace

std::string ToJsonText(const google::protobuf::Message& message) {
  std::string text;
  text.reserve(message.ByteSizeLong() * kTextPerByte);
  WriteMessage(message, &text);
  return text;
}

}  // namespace bellwether::server
