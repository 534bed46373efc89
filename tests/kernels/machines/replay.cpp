// Calls functions of a library with copies of another process's memory: `replay LIBRARY`, calls on stdin, results on stdout.
//
// A call is its function's name in 32 bytes; the number of blocks of memory, and of each the address, the size, whether it
// holds addresses, and its bytes; the number of arguments, and these. All numbers have 64 bits. Addresses within a block,
// in arguments and memory, become those of its copy. Results are the blocks without addresses, as the function left them.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct Block {
    uint64_t address, size, holds_addresses;
    char *copy;
};

static void take(void *target, size_t size) {
    if (fread(target, 1, size, stdin) != size) exit(2);
}
static uint64_t number() {
    uint64_t value;
    take(&value, sizeof value);
    return value;
}

// As aligned as what it is a copy of.
static char *copy_of(const Block &block) {
    char *start = (char *)aligned_alloc(64, (block.size + 127) / 64 * 64) + block.address % 64;
    take(start, block.size);
    return start;
}

static uint64_t moved(uint64_t value, const std::vector<Block> &blocks) {
    for (const Block &block : blocks)
        if (value >= block.address && value < block.address + block.size)
            return (uint64_t)block.copy + (value - block.address);
    return value;
}

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    for (char name[32]; fread(name, 1, sizeof name, stdin) == sizeof name;) {
        std::vector<Block> blocks(number());
        for (Block &block : blocks) {
            block = {number(), number(), number(), nullptr};
            block.copy = copy_of(block);
        }
        for (const Block &block : blocks)
            for (uint64_t at = 0; block.holds_addresses && at + 8 <= block.size; at += 8) {
                uint64_t value;
                memcpy(&value, block.copy + at, 8);
                value = moved(value, blocks);
                memcpy(block.copy + at, &value, 8);
            }
        std::vector<uint64_t> values(number());
        for (uint64_t &value : values) value = moved(number(), blocks);
        values.resize(13);
        auto function = (void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                  uint64_t, uint64_t, uint64_t, uint64_t))dlsym(library, name);
        if (!function) return fprintf(stderr, "%s\n", dlerror()), 1;
        const uint64_t *a = values.data();
        function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
        for (const Block &block : blocks)
            if (!block.holds_addresses) fwrite(block.copy, 1, block.size, stdout);
        fflush(stdout);
        for (const Block &block : blocks) free(block.copy - block.address % 64);
    }
}
