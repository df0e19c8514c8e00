// signal_title.h: what people call a signal, the same on the page, in alerts, commands, plots and documents.
//
// Generated from signal_titles.json, which is the one place for such names.
// Immutable; safe from any thread.

#ifndef BELLWETHER_SIGNAL_TITLE_H_
#define BELLWETHER_SIGNAL_TITLE_H_

#include <string_view>

namespace bellwether {

// "Tied rows" for tied_fraction_bf16; a name that has no title is its own.
std::string_view SignalTitle(std::string_view name);

}  // namespace bellwether

#endif  // BELLWETHER_SIGNAL_TITLE_H_
