#include "server/store/derived_spans.h"

namespace bellwether::server {

DerivedSpans::DerivedSpans(const Layout& layout) : layout_(layout) {
  for (size_t i = 0; i < SignalCount(); ++i) {
    if (SignalTable()[i].derived) signals_.push_back(&SignalTable()[i]);
  }
}

void DerivedSpans::Add(const StepSample& sample, std::vector<Finished>* finished) {
  for (const SignalInfo* const signal : signals_) {
    if (!sample.has(signal->numerator) || !DeriveMatrix(sample, *signal, &values_)) continue;
    SpanBuilder& builder = builders_.try_emplace(signal->id, values_.size()).first->second;
    builder.Add(sample.step, values_.data());
    if (builder.steps() == kSpanSteps) finished->push_back({signal->id, builder.Take()});
  }
}

void DerivedSpans::Grow(const Layout& layout) {
  layout_ = layout;
  builders_.clear();
}

void DerivedSpans::FinishAll(std::vector<Finished>* finished) {
  for (auto& [signal, builder] : builders_) {
    if (builder.steps() > 0) finished->push_back({signal, builder.Take()});
  }
}

void DerivedSpans::Save(ByteWriter* out) const {
  out->PutVarint(builders_.size());
  for (const auto& [signal, builder] : builders_) {
    out->Put(signal);
    builder.Save(out);
  }
}

bool DerivedSpans::Restore(ByteReader* in) {
  builders_.clear();
  for (size_t left = in->GetCount(2); left > 0; --left) {
    const auto id = in->Get<SignalId>();
    const SignalInfo* const signal = FindSignal(id);
    if (!in->ok() || signal == nullptr || !signal->derived) return false;
    const auto cells = static_cast<size_t>(ShapeOf(*signal, layout_).size());
    if (!builders_.try_emplace(id, cells).first->second.Restore(in)) return false;
  }
  return in->ok();
}

size_t DerivedSpans::memory_bytes() const {
  size_t bytes = 0;
  for (const auto& [signal, builder] : builders_) bytes += builder.memory_bytes();
  return bytes;
}

}  // namespace bellwether::server
