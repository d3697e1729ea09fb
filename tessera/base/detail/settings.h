#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// Every environment variable that is read, by us or for a launcher. Nothing else calls getenv.
struct Setting {
  const char* name;
  const char* fallback;  // what it counts as when unset; "" for none
  const char* help;
};
std::span<const Setting> all_settings();

// The value of a row, now. Throws InternalError for a name that is no row, UsageError for text that is no number.
std::string setting(std::string_view name);
int64_t setting_int(std::string_view name);
double setting_number(std::string_view name);
bool setting_is_set(std::string_view name);  // given in the environment, and not empty

}  // namespace tessera
