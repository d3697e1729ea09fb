from tessera import main

main()
