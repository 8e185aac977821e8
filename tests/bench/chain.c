/* The limit of block keys: the same SHA-256 compressions and nothing else. The two that take in the scope key are
 * done once; a block of 16 tokens then takes three inner and one outer. The functions are those of the libcrypto
 * that Python uses; they are declared here so that no header of it needs to be installed. */
#include <stddef.h>
#include <string.h>

typedef struct { unsigned char opaque[128]; } SHA256_CTX;
int SHA256_Init(SHA256_CTX *);
int SHA256_Update(SHA256_CTX *, const void *, size_t);
int SHA256_Final(unsigned char *, SHA256_CTX *);

void chain(const unsigned char key[64], const unsigned char compat_id[32], const unsigned char *tokens,
           size_t blocks, unsigned char *keys)
{
    unsigned char pad[64], message[141] = "KVSP-BLOCK-1", digest[32];
    SHA256_CTX inner, outer, state;
    for (int i = 0; i < 64; i++) pad[i] = key[i] ^ 0x36;
    SHA256_Init(&inner);
    SHA256_Update(&inner, pad, 64);
    for (int i = 0; i < 64; i++) pad[i] = key[i] ^ 0x5c;
    SHA256_Init(&outer);
    SHA256_Update(&outer, pad, 64);
    memcpy(message + 13, compat_id, 32);
    for (size_t block = 0; block < blocks; block++) {
        memcpy(message + 77, tokens + 64 * block, 64);
        state = inner;
        SHA256_Update(&state, message, sizeof message);
        SHA256_Final(digest, &state);
        state = outer;
        SHA256_Update(&state, digest, 32);
        SHA256_Final(message + 45, &state);
        memcpy(keys + 32 * block, message + 45, 32);
    }
}
