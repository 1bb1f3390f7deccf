// driver <plugin> <scenario> [name=value ...]: exit status 0 if what was to happen happened.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "crc32c.h"
#include "scenarios.h"
#include "sha256.h"

namespace {

void set(Options& options, const std::string& name, const std::string& value) {
    const struct {
        const char* name;
        int* to;
    } numbers[] = {{"ranks", &options.ranks},     {"epochs", &options.epochs}, {"contexts", &options.contexts},
                   {"ops", &options.ops},         {"queue", &options.queue},   {"table", &options.table},
                   {"seconds", &options.seconds}, {"lag", &options.lag},       {"mixed", &options.mixed}};
    for (const auto& number : numbers) {
        if (name == number.name) {
            *number.to = std::atoi(value.c_str());
            return;
        }
    }
    if (name == "slice") {
        options.slice = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "seed") {
        options.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "memory") {
        options.memory = value;
    } else if (name == "mode") {
        options.mode = value;
    } else {
        give_up("unknown option " + name);
    }
}

std::string hex(const moecomm::rma::Digest& digest) {
    std::string text;
    char two[3];
    for (const uint8_t byte : digest) text += (std::snprintf(two, sizeof two, "%02x", byte), two);
    return text;
}

// Lines of stdin: a kind and a text in hexadecimal digits; hmac: "hmac <key> <text>".
int digests() {
    char kind[16], first[4096], second[4096];
    const auto bytes_of = [](const char* digits) {
        std::string bytes;
        for (; digits[0] != 0 && digits[1] != 0 && digits[0] != '-'; digits += 2) {
            bytes += static_cast<char>(std::strtoul(std::string(digits, 2).c_str(), nullptr, 16));
        }
        return bytes;
    };
    while (std::scanf("%15s %4095s %4095s", kind, first, second) == 3) {
        const std::string key = bytes_of(first), text = bytes_of(second);
        if (std::strcmp(kind, "hmac") == 0) std::printf("%s\n", hex(moecomm::rma::hmac_sha256(key, text.data(), text.size())).c_str());
        if (std::strcmp(kind, "sha256") == 0) {
            moecomm::rma::Sha256 sum;
            sum.add(text.data(), text.size() / 3);
            sum.add(text.data() + text.size() / 3, text.size() - text.size() / 3);
            std::printf("%s\n", hex(sum.end()).c_str());
        }
        if (std::strcmp(kind, "crc32c") == 0) {
            const uint32_t crc = moecomm::rma::crc32c(text.data(), text.size());
            require(crc == moecomm::rma::crc32c_by_table(text.data(), text.size()), "table and instruction differ");
            std::printf("%08x\n", crc);
        }
    }
    return 0;
}

}  // namespace

int main(int count, char** words) {
    if (count == 2 && std::strcmp(words[1], "digests") == 0) return digests();
    if (count < 3) return 2;
    Options options;
    options.plugin = words[1];
    options.scenario = words[2];
    for (int i = 3; i < count; ++i) {
        const std::string word = words[i];
        const size_t equals = word.find('=');
        if (equals == std::string::npos) return 2;
        set(options, word.substr(0, equals), word.substr(equals + 1));
    }
    World world(options);
    const std::string& scenario = options.scenario;
    int dies = -1;
    const auto body = [&](int rank) -> bool {
        if (scenario == "random") return random_case(options, world, rank);
        if (scenario == "killed") return killed(options, world, rank);
        if (scenario == "killed_while_watched") return killed_while_watched(options, world, rank);
        if (scenario == "silent") return silent(options, world, rank);
        if (scenario == "wrong_secret") return wrong_secret(options, world, rank);
        if (scenario == "absent") return absent(options, world, rank);
        if (scenario == "strangers") return strangers(options, world, rank);
        if (scenario == "full_door") return full_door(options, world, rank);
        if (scenario == "no_descriptors") return no_descriptors(options, world, rank, false);
        if (scenario == "no_descriptors_ever") return no_descriptors(options, world, rank, true);
        if (scenario == "no_descriptor_for_window") return no_descriptor_for_window(options, world, rank);
        if (scenario == "proofs") return proofs(options, world, rank);
        if (scenario == "short_secret") return short_secret(options, world, rank);
        if (scenario == "crowded") return crowded(options, world, rank);
        if (scenario == "half_registered") return half_registered(options, world, rank);
        if (scenario == "misuse") return misuse(options, world, rank);
        if (scenario == "again") return again(options, world, rank);
        if (scenario == "left") return left(options, world, rank);
        if (scenario.compare(0, 5, "late-") == 0) return late_signal(options, world, rank, scenario.substr(5));
        if (scenario.compare(0, 5, "liar-") == 0) return liar(options, world, rank, scenario.substr(5));
        give_up("unknown scenario " + scenario);
    };
    if (scenario.compare(0, 6, "killed") == 0) dies = 1;
    return world.run(body, dies) ? 0 : 1;
}
