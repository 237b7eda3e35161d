// The little JSON that causes and statistics need: writing text, and reading one field back.
#ifndef SMP_TF_OPS_CC_TRANSPORT_JSON_H_
#define SMP_TF_OPS_CC_TRANSPORT_JSON_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace smp {

// A JSON string literal, quotes included.
std::string JsonString(std::string_view text);

// The value of the first string field of this name in a flat object; empty if there is none.
std::string JsonField(std::string_view object, std::string_view name);

// The same flat object in no more than so many bytes (a hundred or more): where it is longer, its
// "message" is shorter, and where that is not enough it has no other field.
std::string JsonWithin(const std::string& object, size_t bytes);

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_JSON_H_
