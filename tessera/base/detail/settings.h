#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// An environment variable. All variables that the library reads are listed in settings.cpp; nothing else calls getenv.
struct Setting {
  const char* name;
  const char* fallback;  // value if the variable is unset; "" for none
  const char* help;
};
std::span<const Setting> all_settings();

// The present value of a variable. Throws InternalError for a name that is not listed, UsageError for text that is not
// a number.
std::string setting(std::string_view name);
int64_t setting_int(std::string_view name);
double setting_number(std::string_view name);
bool setting_is_set(std::string_view name);  // set in the environment, and not empty

}  // namespace tessera
